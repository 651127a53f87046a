"""Published algorithms: compositions of kernels and transforms, one paper or family per file.

Algorithms contain no arithmetic. They may import all lower layers, kernels and transforms.
"""

from fedmcmc.algorithms._dg_sgld import dg_sgld as dg_sgld
from fedmcmc.algorithms._fa_hmc import fa_hmc as fa_hmc
from fedmcmc.algorithms._fa_hmc import fa_ld as fa_ld
from fedmcmc.algorithms._fed_avg import fed_avg as fed_avg
from fedmcmc.algorithms._fed_avg import fed_pa as fed_pa
from fedmcmc.algorithms._fed_be import fed_be as fed_be
from fedmcmc.algorithms._fed_ep import adf as adf
from fedmcmc.algorithms._fed_ep import fed_ep as fed_ep
from fedmcmc.algorithms._fed_ep import fed_sep as fed_sep
from fedmcmc.algorithms._fsgld import dsgld as dsgld
from fedmcmc.algorithms._fsgld import fsgld as fsgld
from fedmcmc.algorithms._fsgld import sgld as sgld
from fedmcmc.algorithms._lsd import lsd as lsd
from fedmcmc.algorithms._lsd import lsd_pp as lsd_pp
from fedmcmc.algorithms._lsd import lsd_star as lsd_star
from fedmcmc.algorithms._lsd import psgld as psgld
from fedmcmc.algorithms._qlsd import qlsd as qlsd
from fedmcmc.algorithms._qlsd import qlsd_pp as qlsd_pp
from fedmcmc.algorithms._qlsd import qlsd_star as qlsd_star
