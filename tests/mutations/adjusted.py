"""Bugs of kernels that accept or reject, which law tests must notice; see `test_mutations`."""

LAW = "laws/test_hmc_law.py"
KEPT = f"{LAW}::test_chains_from_exact_draws_keep_the_law_and_accept_as_often_as_told"
STEPS, METRIC = f"{KEPT}[1-3 steps]", f"{KEPT}[another metric]"
VOID = f"{LAW}::test_faults_make_rounds_void_and_leave_the_law_alone[1-3 steps]"
WALL = f"{LAW}::test_walls_do_not_push_chains_to_where_trajectories_end_soon"
TESTS = [STEPS, METRIC, VOID, WALL]
HMC = "kernels/_hamiltonian.py"

MUTATIONS = {
    "no kinetic energy": (
        HMC,
        "return sum(terms, jnp.zeros((), dtype)) / 2",
        "return 0 * sum(terms, jnp.zeros((), dtype))",
        STEPS,
    ),
    "no half kick at a trajectory's end": (
        HMC,
        "momentum = half_kick(old.momentum, gradient, old.step_size, self.metric)",
        "momentum = old.momentum",
        STEPS,
    ),
    "every proposal accepted": (
        HMC,
        "taken = ends & (is_start | (draws.uniform < accepted))",
        "taken = ends",
        STEPS,
    ),
    "a rejection that is not recorded": (
        HMC,
        "position=position,",
        "position=trees.select(ends & judged.whole, here, position),",
        STEPS,
    ),
    "the energy of the rejected end": (
        HMC,
        "_kinetic(draws.momentum) - at_position[0], old.energy",
        "_kinetic(draws.momentum) - log_density, old.energy",
        STEPS,
    ),
    "the gradient of the rejected end": (
        HMC,
        "at_stand = trees.select(ends, at_position[1], gradient)",
        "at_stand = gradient",
        STEPS,
    ),
    "a step size that changes on the way": (
        HMC,
        "ends, (position, draws.momentum, new_step), (here, momentum, old.step_size)",
        "ends, (position, draws.momentum, new_step), (here, momentum, 2 * old.step_size)",
        STEPS,
    ),
    "the transposed root of a metric": (
        "dynamics/_metrics.py",
        "return _times(jax.tree.map(jnp.transpose, self.factor), gradient)",
        "return _times(self.factor, gradient)",
        STEPS,
    ),
    "a prior that is not in the gradient": (
        "kernels/_adjusted.py",
        "gradient = trees.add(total.gradient, trees.cast_like(of_prior, total.gradient))",
        "gradient = total.gradient",
        METRIC,
    ),
    "a prior that does not decide": (
        "kernels/_adjusted.py",
        "log_density = value + prior.astype(value.dtype)",
        "log_density = value",
        METRIC,
    ),
    "void rounds that count": (
        HMC,
        "judged.whole, (server, position, asked)",
        "judged.whole | True, (server, position, asked)",
        VOID,
    ),
    "a trajectory that ends where it meets a wall": (
        HMC,
        "ends = is_start | (done >= old.length)",
        "ends = is_start | (done >= old.length) | jnp.isneginf(log_density)",
        WALL,
    ),
}
