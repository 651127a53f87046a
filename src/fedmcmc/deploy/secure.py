"""Sessions of pinned identities, masks, and what a site checks before it sends a masked word.

Pure functions on bytes; nothing here opens a connection. Needs the extra ``deploy``.
"""

from fedmcmc.deploy._rules import RuleError as RuleError
from fedmcmc.deploy._rules import SiteRules as SiteRules
from fedmcmc.deploy._session import Consortium as Consortium
from fedmcmc.deploy._session import Handshake as Handshake
from fedmcmc.deploy._session import Session as Session
from fedmcmc.deploy._session import SessionError as SessionError
from fedmcmc.deploy._session import session_identifier as session_identifier
from fedmcmc.deploy._session import transcript as transcript
from fedmcmc.deploy._sums import MaskTag as MaskTag
from fedmcmc.deploy._sums import mask as mask
from fedmcmc.deploy._sums import masked_bytes as masked_bytes
from fedmcmc.deploy._sums import masked_frame as masked_frame
from fedmcmc.deploy._sums import read_masked as read_masked
from fedmcmc.deploy._sums import unmask as unmask
