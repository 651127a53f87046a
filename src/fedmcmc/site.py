"""The command of a site: ``fedmcmc-site site.toml``; see docs/guides/operations.md."""

import sys

from fedmcmc.deploy import command, run_site

__all__ = ["main"]

main = command("fedmcmc-site", __doc__, run_site, is_module=__name__ == "__main__")

if __name__ == "__main__":
    sys.exit(main())
