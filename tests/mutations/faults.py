"""Bugs of faults that their law tests must notice; see `test_mutations`."""

LAW = "transforms/test_faults.py::test_each_round_has_the_exact_distribution"
DROP, LATE, ALL, MEMORY = (f"{LAW}[{case}]" for case in ("drop", "late", "all", "memory"))
RELAY = "transforms/test_faults.py::test_a_relay_that_drops_out_stays_where_it_is"
FAULTY = "transforms/_faulty.py"

MUTATIONS = {
    "all clients drop out together": (
        "random/_streams.py",
        "return jax.random.fold_in(fault_stream, index)",
        "return fault_stream",
        DROP,
    ),
    "what arrives not divided by its probability": (
        FAULTY,
        "cohort.weight / arrives",
        "cohort.weight",
        DROP,
    ),
    "one uniform number for two kinds of faults": (
        FAULTY,
        "u[:, 1] <",
        "u[:, 0] <",
        ALL,
    ),
    "late messages lost": (
        FAULTY,
        "trees.add(total.now, _settled(pending))",
        "total.now",
        LATE,
    ),
    "late messages added in every later round": (
        FAULTY,
        "_settled(pending)), total.late",
        "_settled(pending)), trees.add(pending, total.late)",
        LATE,
    ),
    "what is late taken as relative to memories before it": (
        "transforms/_compressed.py",
        "numbers = trees.add(_without_exact(message), total.change)",
        "numbers = _without_exact(message)",
        MEMORY,
    ),
    "a memory moved by a message that is left out": (
        "rounds/_clients.py",
        "new = where_active(members.active, new, old)",
        "new = where_active(group.cohort.active, new, old)",
        MEMORY,
    ),
    "what is relative to memories not rescaled": (
        FAULTY,
        "inner.weighted or holds_pooled_memory(kernel)",
        "inner.weighted",
        MEMORY,
    ),
    "a relay's gradients rescaled": (
        FAULTY,
        "inner.weighted or holds_pooled_memory(kernel)",
        "True",
        RELAY,
    ),
}
