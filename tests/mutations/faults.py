"""Bugs of faults that their law tests must notice; see `test_mutations`."""

LAW = "transforms/test_faults.py::test_each_round_has_the_exact_distribution"
DROP, LATE, ALL, MEMORY = (f"{LAW}[{case}]" for case in ("drop", "late", "all", "memory"))
RELAY = "transforms/test_faults.py::test_a_relay_that_drops_out_stays_where_it_is"

MUTATIONS = {
    "random/_streams.py::fault_key": {
        "all clients drop out together": (
            "jax.random.fold_in(fault_stream, index) -> fault_stream",
            DROP,
        ),
    },
    "transforms/_faulty.py::FaultyParticipation.prepare": {
        "what arrives not divided by its probability": (
            "cohort.weight / arrives -> cohort.weight",
            DROP,
        ),
        "one uniform number for two kinds of faults": ("u[:, 1] -> u[:, 0]", ALL),
    },
    "transforms/_faulty.py::_Waiting.aggregate": {
        "late messages lost": ("trees.add(total.now, _settled(pending)) -> total.now", LATE),
        "late messages added in every later round": (
            "total.late -> trees.add(pending, total.late)",
            LATE,
        ),
    },
    "transforms/_faulty.py::faults": {
        "what is relative to memories not rescaled": (
            "holds_pooled_memory(kernel) -> False",
            MEMORY,
        ),
        "a relay's gradients rescaled": (
            "inner.weighted or holds_pooled_memory(kernel) or weights_at_clients(kernel) -> True",
            RELAY,
        ),
    },
    "transforms/_compressed.py::arrived_late": {
        "what is late taken as relative to memories before it": (
            "trees.add(_without_exact(message), total.change) -> _without_exact(message)",
            MEMORY,
        ),
    },
    "rounds/_clients.py::_run_on_one_device": {
        "a memory moved by a message that is left out": (
            "where_active(members.active, new, old) -> where_active(group.cohort.active, new, old)",
            MEMORY,
        ),
    },
}
