"""Runs at sites in threads whose messages are recorded."""

from fedmcmc import deploy
from fedmcmc.deploy._frames import Frame
from tests.contracts.model import KEY
from tests.support import studies
from tests.support.site_runs import POSITION


def run_over(transport, study, *, key=KEY, kernel="main", position=POSITION, **settings):
    """Run a study's kernel with the sites that joined a transport."""
    settings = dict(progress=False) | settings
    return deploy.run(study, key, kernel, position, transport=transport, **settings)


def record_run(study, folder, *, rows=None, **settings):
    """Return each site's pairs of requests and answers, by name, and the samples of a run.

    `rows` maps names of sites to rows, if these are not the contract's.
    """
    local, pairs = deploy.LocalTransport(), {name: [] for name in study.sites}
    for name in study.sites:
        changes = {} if rows is None else dict(rows=rows[name])
        site = studies.site_of(study, name, folder, **changes)
        local.join(site, heard=lambda *pair, name=name: pairs[name].append(pair))
    return pairs, run_over(local, study, **settings)


def frames_of(pairs, *kinds):
    """Return a site's answered requests of some kinds, and the answers, as frames."""
    frames = [tuple(map(Frame.parse, pair)) for pair in pairs if pair[1]]
    return [pair for pair in frames if pair[0].kind in kinds]
