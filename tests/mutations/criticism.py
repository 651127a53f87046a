"""Bugs of criticism that its tests must notice; see `test_mutations`."""

LOO = "criticism/test_loo.py::test_loo_equals_that_of_arviz_on_pooled_rows[0.4-normal]"
GROUPS = "criticism/test_units.py::test_the_density_of_a_unit_that_is_left_out_is_exact[None]"
COMPARE = "criticism/test_loo.py::test_compare_uses_differences_by_rows"
CELLS = (
    "criticism/test_predictive.py::test_clients_merge_small_cells_of_observed_and_replicated_rows"
)
CONFLICT = "criticism/test_conflict.py::test_statistics_equal_formulas_of_pseudo_inverses"
WITHOUT = "criticism/test_leave_out.py::test_moments_and_shifts_without_a_client_are_exact"
OUTCOMES = "criticism/test_calibrate.py::test_outcomes_are_redrawn_and_covariates_stay"
ELSEWHERE = "criticism/test_calibrate.py::test_clients_elsewhere_draw_their_outcomes_themselves"

MUTATIONS = {
    "a tail that forgets how efficient draws are": (
        "criticism/_pareto.py",
        "int(3 * np.sqrt(num / efficiency))",
        "int(3 * np.sqrt(num))",
        LOO,
    ),
    "rows that are padding are judged too": (
        "criticism/_loo_question.py",
        "judged = mask & finite.all(0)",
        "judged = finite.all(0)",
        LOO,
    ),
    "groups that a client has not are judged too": (
        "criticism/_loo_question.py",
        "else _groups_present(client)",
        "else jnp.ones(max_groups(client), bool)",
        GROUPS,
    ),
    "the standard error of a difference without its mean": (
        "criticism/_compare.py",
        "np.maximum(squares - difference**2 / num, 0)",
        "np.maximum(squares, 0)",
        COMPARE,
    ),
    "small cells of replicated rows are shown": (
        "criticism/_predictive.py",
        "merge_cells(sum_gaps, targets)",
        "sum_gaps",
        CELLS,
    ),
    "clients draw the same outcomes": (
        "criticism/_predictive.py",
        "jax.random.fold_in(words, client.index)",
        "words",
        CELLS,
    ),
    "conflict counts the prior twice": (
        "criticism/_conflict.py",
        "full = prior_precision / np.outer(unit, unit)",
        "full = 2 * prior_precision / np.outer(unit, unit)",
        CONFLICT,
    ),
    "a shift with its sign turned": (
        "criticism/_leave_out.py",
        "shift=(mean - means) / sd",
        "shift=(means - mean) / sd",
        WITHOUT,
    ),
    "clients redraw outcomes by one key": (
        "criticism/_wrapped.py",
        "jax.random.fold_in(rng_key, client.index)",
        "rng_key",
        OUTCOMES,
    ),
    "outcomes that are drawn and not looked at": (
        "criticism/_wrapped.py",
        "replace(client, rows=rows, start=jnp.zeros_like(client.start))",
        "client",
        ELSEWHERE,
    ),
}
