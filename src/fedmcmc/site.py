"""The command of a site: ``python -m fedmcmc.site site.toml``; see docs/deploy.md."""

import argparse
import logging
import sys
from collections.abc import Sequence

from fedmcmc.deploy import Refused, SiteError, run_site

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a site as a settings file says; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fedmcmc.site", description=__doc__)
    parser.add_argument("settings", help="a TOML file, see fedmcmc.deploy.run_site")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("jax").setLevel(logging.WARNING)
    try:
        run_site(given.settings)
    except (Refused, SiteError, ValueError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
