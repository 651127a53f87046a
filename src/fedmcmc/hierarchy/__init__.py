"""Latents that belong to a client's groups and never leave it: integrated out, or drawn there.

The room sees one client at a time. It imports data, gradients and the ground floor.
"""

from fedmcmc.hierarchy._few_groups import few_groups_warning as few_groups_warning
from fedmcmc.hierarchy._few_groups import of_few_clients as of_few_clients
from fedmcmc.hierarchy._gaussian_moves import conjugate as conjugate
from fedmcmc.hierarchy._gaussian_moves import ula as ula
from fedmcmc.hierarchy._going_on import begins_latents as begins_latents
from fedmcmc.hierarchy._going_on import expect_same_latents as expect_same_latents
from fedmcmc.hierarchy._going_on import with_drawn_latents as with_drawn_latents
from fedmcmc.hierarchy._going_on import with_latents as with_latents
from fedmcmc.hierarchy._going_on import with_learned_steps as with_learned_steps
from fedmcmc.hierarchy._latents import Accepted as Accepted
from fedmcmc.hierarchy._latents import Groups as Groups
from fedmcmc.hierarchy._latents import Locals as Locals
from fedmcmc.hierarchy._latents import conditional_variances as conditional_variances
from fedmcmc.hierarchy._latents import find_modes as find_modes
from fedmcmc.hierarchy._latents import groups_of as groups_of
from fedmcmc.hierarchy._latents import locals_in as locals_in
from fedmcmc.hierarchy._latents import made_up_rows as made_up_rows
from fedmcmc.hierarchy._latents import missing_information as missing_information
from fedmcmc.hierarchy._latents import refuse_two_levels as refuse_two_levels
from fedmcmc.hierarchy._local_draws import LocalDraws as LocalDraws
from fedmcmc.hierarchy._local_draws import local_draws as local_draws
from fedmcmc.hierarchy._marginal import MAX_DIMENSIONS as MAX_DIMENSIONS
from fedmcmc.hierarchy._marginal import MORE_NODES as MORE_NODES
from fedmcmc.hierarchy._marginal import MarginalTerms as MarginalTerms
from fedmcmc.hierarchy._marginal import failed_searches as failed_searches
from fedmcmc.hierarchy._marginal import marginal as marginal
from fedmcmc.hierarchy._marginal import quadrature_error as quadrature_error
from fedmcmc.hierarchy._moments import LocalMoments as LocalMoments
from fedmcmc.hierarchy._moments import local_moments as local_moments
from fedmcmc.hierarchy._moments import with_moments as with_moments
from fedmcmc.hierarchy._new_group import new_group as new_group
from fedmcmc.hierarchy._refresh import Here as Here
from fedmcmc.hierarchy._refresh import Independence as Independence
from fedmcmc.hierarchy._refresh import Moved as Moved
from fedmcmc.hierarchy._refresh import Refresh as Refresh
from fedmcmc.hierarchy._refresh import first_locals as first_locals
from fedmcmc.hierarchy._refresh import independence as independence
from fedmcmc.hierarchy._trajectories import Trajectories as Trajectories
from fedmcmc.hierarchy._trajectories import hmc as hmc
from fedmcmc.hierarchy._trajectories import mala as mala
from fedmcmc.hierarchy._two_levels import TwoLevels as TwoLevels
from fedmcmc.hierarchy._two_levels import constrain_client as constrain_client
from fedmcmc.hierarchy._two_levels import latents_of as latents_of
from fedmcmc.hierarchy._two_levels import two_levels as two_levels
from fedmcmc.hierarchy._unpooled import forest as forest
from fedmcmc.hierarchy._unpooled import unpooled as unpooled
