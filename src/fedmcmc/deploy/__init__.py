"""Real sites: the same kernels, run between owners who do not trust each other.

A site has its own rows, computes `rounds.client_step` on them, and stores its state on its own
disk. The server receives codes, adds them, and runs `fedmcmc.sample`, `fit`, `whiten` and similar
functions with sites in place of data. Only bytes cross the network, through a transport. If a study
uses masks, the server can read only sums over all sites (`fedmcmc.deploy.secure`). This package may
import all lower layers, and no other package imports it.
"""

from fedmcmc.deploy._approval import Approval as Approval
from fedmcmc.deploy._audit import AuditLog as AuditLog
from fedmcmc.deploy._audit import verify_log as verify_log
from fedmcmc.deploy._commands import add_commands as add_commands
from fedmcmc.deploy._commands import command as command
from fedmcmc.deploy._commands import isolate_process as isolate_process
from fedmcmc.deploy._config import connect as connect
from fedmcmc.deploy._config import run_server as run_server
from fedmcmc.deploy._config import run_site as run_site
from fedmcmc.deploy._consortium import make_consortium as make_consortium
from fedmcmc.deploy._frames import Refused as Refused
from fedmcmc.deploy._grpc import Credentials as Credentials
from fedmcmc.deploy._grpc import GrpcServer as GrpcServer
from fedmcmc.deploy._grpc import serve_site as serve_site
from fedmcmc.deploy._limits import Limits as Limits
from fedmcmc.deploy._links import SiteError as SiteError
from fedmcmc.deploy._masks import SUMS as SUMS
from fedmcmc.deploy._pki import fingerprint as fingerprint
from fedmcmc.deploy._pki import make_authority as make_authority
from fedmcmc.deploy._pki import make_identity as make_identity
from fedmcmc.deploy._pki import make_party as make_party
from fedmcmc.deploy._server import Sites as Sites
from fedmcmc.deploy._server import run as run
from fedmcmc.deploy._site import Site as Site
from fedmcmc.deploy._study import FIT as FIT
from fedmcmc.deploy._study import SETUP as SETUP
from fedmcmc.deploy._study import Study as Study
from fedmcmc.deploy._transport import LocalTransport as LocalTransport
from fedmcmc.deploy._transport import Transport as Transport
