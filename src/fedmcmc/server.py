"""The command of a server: ``fedmcmc-server server.toml``; see docs/guides/operations.md."""

import sys

from fedmcmc.deploy import command, run_server

__all__ = ["main"]

main = command("fedmcmc-server", __doc__, run_server, is_module=__name__ == "__main__")

if __name__ == "__main__":
    sys.exit(main())
