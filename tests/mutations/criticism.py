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
    "criticism/_pareto.py::tail_length": {
        "a tail that forgets how efficient draws are": ("num / efficiency -> num", LOO),
    },
    "criticism/_loo_question.py::LeaveOneOut.sum_terms": {
        "rows that are padding are judged too": ("mask & finite.all(0) -> finite.all(0)", LOO),
    },
    "criticism/_loo_question.py::LeaveGroupsOut.client_sums": {
        "groups that a client has not are judged too": (
            "_groups_present(client) -> jnp.ones(max_groups(client), bool)",
            GROUPS,
        ),
    },
    "criticism/_compare.py::compare": {
        "the standard error of a difference without its mean": (
            "squares - difference ** 2 / num -> squares",
            COMPARE,
        ),
    },
    "criticism/_predictive.py::Replication.merge_small_cells": {
        "small cells of replicated rows are shown": (
            "merge_cells(sum_gaps, targets) -> sum_gaps",
            CELLS,
        ),
    },
    "criticism/_predictive.py::Replication.answer": {
        "clients draw the same outcomes": (
            "jax.random.fold_in(words, client.index) -> words",
            CELLS,
        ),
    },
    "criticism/_conflict.py::conflict": {
        "conflict counts the prior twice": (
            "prior_precision / np.outer(unit, unit) -> 2 * prior_precision / np.outer(unit, unit)",
            CONFLICT,
        ),
    },
    "criticism/_leave_out.py::leave_out": {
        "a shift with its sign turned": ("mean - means -> means - mean", WITHOUT),
    },
    "criticism/_wrapped.py::redraw_rows": {
        "clients redraw outcomes by one key": (
            "jax.random.fold_in(rng_key, client.index) -> rng_key",
            OUTCOMES,
        ),
    },
    "criticism/_wrapped.py::Redrawn.answer": {
        "outcomes that are drawn and not looked at": (
            "replace(client, rows=rows, start=jnp.zeros_like(client.start)) -> client",
            ELSEWHERE,
        ),
    },
}
