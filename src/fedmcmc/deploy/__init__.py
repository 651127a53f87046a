"""Real sites: the same kernel between owners who do not trust each other.

A site has its own rows, computes `rounds.client_step` on them, and keeps its state on its own disk;
the server receives codes, adds them, and runs `fedmcmc.sample`, `fit`, `whiten` and the like with
sites in place of data. Bytes are all that crosses, over a transport. `fedmcmc.deploy.secure` holds
sessions and masks of secure sums, which sites and server do not use yet. The room may import every
room on lower floors, and rooms do not import it.
"""

from fedmcmc.deploy._config import run_server as run_server
from fedmcmc.deploy._config import run_site as run_site
from fedmcmc.deploy._frames import Frame as Frame
from fedmcmc.deploy._frames import FrameError as FrameError
from fedmcmc.deploy._frames import Refused as Refused
from fedmcmc.deploy._frames import Tag as Tag
from fedmcmc.deploy._grpc import Credentials as Credentials
from fedmcmc.deploy._grpc import GrpcServer as GrpcServer
from fedmcmc.deploy._grpc import serve_site as serve_site
from fedmcmc.deploy._links import SiteError as SiteError
from fedmcmc.deploy._pki import fingerprint as fingerprint
from fedmcmc.deploy._pki import make_authority as make_authority
from fedmcmc.deploy._pki import make_party as make_party
from fedmcmc.deploy._server import Sites as Sites
from fedmcmc.deploy._server import run as run
from fedmcmc.deploy._site import Site as Site
from fedmcmc.deploy._study import FIT as FIT
from fedmcmc.deploy._study import SETUP as SETUP
from fedmcmc.deploy._study import Study as Study
from fedmcmc.deploy._transport import Local as Local
from fedmcmc.deploy._transport import Transport as Transport
