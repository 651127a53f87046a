"""Random effects (mixed models): latents of a client's groups that never leave the client.

They are integrated out (`marginal`), or the client draws them (`Refresh`). All functions compute
for one client at a time.
"""

from fedmcmc.hierarchy._few_groups import few_groups_warning as few_groups_warning
from fedmcmc.hierarchy._gaussian_moves import conjugate as conjugate
from fedmcmc.hierarchy._gaussian_moves import ula as ula
from fedmcmc.hierarchy._latents import Groups as Groups
from fedmcmc.hierarchy._latents import LatentState as LatentState
from fedmcmc.hierarchy._latents import find_latent_state as find_latent_state
from fedmcmc.hierarchy._latents import find_modes as find_modes
from fedmcmc.hierarchy._latents import groups_of as groups_of
from fedmcmc.hierarchy._latents import made_up_rows as made_up_rows
from fedmcmc.hierarchy._latents import missing_information as missing_information
from fedmcmc.hierarchy._latents import sum_conditional_variances as sum_conditional_variances
from fedmcmc.hierarchy._local_draws import LatentDraws as LatentDraws
from fedmcmc.hierarchy._local_draws import local_draws as local_draws
from fedmcmc.hierarchy._marginal import MAX_DIMENSIONS as MAX_DIMENSIONS
from fedmcmc.hierarchy._marginal import MORE_NODES as MORE_NODES
from fedmcmc.hierarchy._marginal import MarginalTerms as MarginalTerms
from fedmcmc.hierarchy._marginal import failed_searches as failed_searches
from fedmcmc.hierarchy._marginal import marginal as marginal
from fedmcmc.hierarchy._marginal import quadrature_error as quadrature_error
from fedmcmc.hierarchy._new_group import new_group as new_group
from fedmcmc.hierarchy._refresh import Independence as Independence
from fedmcmc.hierarchy._refresh import Refresh as Refresh
from fedmcmc.hierarchy._refresh import RefreshInput as RefreshInput
from fedmcmc.hierarchy._refresh import RefreshResult as RefreshResult
from fedmcmc.hierarchy._refresh import independence as independence
from fedmcmc.hierarchy._refresh import initial_latent_state as initial_latent_state
from fedmcmc.hierarchy._trajectories import hmc as hmc
from fedmcmc.hierarchy._unpooled import forest as forest
from fedmcmc.hierarchy._unpooled import unpooled as unpooled
