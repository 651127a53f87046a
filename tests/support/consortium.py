"""A consortium's certificates, and its server and sites over gRPC on this machine."""

import threading

import pytest

from fedmcmc import deploy
from tests.support.studies import site_of


def credentials(folder, name):
    return deploy.Credentials(folder / f"{name}.key", folder / f"{name}.crt", folder / "ca.crt")


def make_keys(folder, names):
    """Make an authority and keys of a server and sites; return the sites' fingerprints."""
    deploy.make_authority(folder)
    deploy.make_party(folder, folder, "server", hosts=("localhost", "127.0.0.1"))
    return {name: deploy.make_party(folder, folder, name) for name in names}


class Threads:
    """Sites in threads of this program that dial a server's port."""

    def __init__(self, port):
        self.port, self.stop, self.errors, self.threads = port, threading.Event(), {}, []

    def join(self, study, name, folder, keys, *, claims=None, **settings):
        site = site_of(study, name, folder, **settings)
        site.name = claims or name

        def serve():
            try:
                deploy.serve_site(site, f"localhost:{self.port}", keys, stop=self.stop)
            except deploy.Refused as error:
                self.errors[name] = str(error)

        self.threads.append(threading.Thread(target=serve, daemon=True))
        self.threads[-1].start()
        return self.threads[-1]

    def end(self):
        self.stop.set()
        for thread in self.threads:
            thread.join(timeout=20)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Certificates of the study's parties: their folder, and the fingerprints by name."""
    from tests.support.studies import NAMES

    folder = tmp_path_factory.mktemp("keys")
    return folder, make_keys(folder, NAMES)
