"""Sessions of known identities, masks, and the checks of a site before it sends masked words.

These functions work on bytes and open no connections. They need the extra ``deploy``.
"""

from fedmcmc.deploy._rules import RuleError as RuleError
from fedmcmc.deploy._rules import SiteRules as SiteRules
from fedmcmc.deploy._session import Handshake as Handshake
from fedmcmc.deploy._session import MaskGroup as MaskGroup
from fedmcmc.deploy._session import Session as Session
from fedmcmc.deploy._session import SessionError as SessionError
from fedmcmc.deploy._session import transcript as transcript
from fedmcmc.deploy._sums import MaskTag as MaskTag
from fedmcmc.deploy._sums import mask as mask
from fedmcmc.deploy._sums import read_masked as read_masked
from fedmcmc.deploy._sums import unmask as unmask
