"""Bugs of faults that their law tests must notice; see `test_mutations`."""

LAW = "transforms/test_faults.py::test_law_of_every_round"
DROP, LATE, ALL, MEMORY = (f"{LAW}[{case}]" for case in ("drop", "late", "all", "memory"))
RELAY = "transforms/test_faults.py::test_a_relay_that_drops_out_stays_where_it_is"
TESTS = [DROP, LATE, ALL, MEMORY, RELAY]
FAULTY, PARTICIPATION = "transforms/_faulty.py", "transforms/_faulty_participation.py"

MUTATIONS = {
    "all clients drop out together": (
        "random/_streams.py",
        "return jax.random.fold_in(fault_stream, index)",
        "return fault_stream",
        DROP,
    ),
    "what arrives not divided by its probability": (
        PARTICIPATION,
        "cohort.weight / (arrives(drop) * arrives(nan))",
        "cohort.weight",
        DROP,
    ),
    "one uniform number for two kinds of faults": (
        PARTICIPATION,
        "u[:, 1] <",
        "u[:, 0] <",
        ALL,
    ),
    "late messages lost": (
        FAULTY,
        "arrived = trees.add(total.now, arrived_late(server_state.pending))",
        "arrived = total.now",
        LATE,
    ),
    "late messages added in every later round": (
        FAULTY,
        "return moved, _Server(server, total.late), info",
        "pending = trees.add(server_state.pending, total.late)\n"
        "        return moved, _Server(server, pending), info",
        LATE,
    ),
    "what is late taken as relative to memories before it": (
        "transforms/_compressed.py",
        "numbers = trees.add(_without_exact(total.said), total.change)",
        "numbers = _without_exact(total.said)",
        MEMORY,
    ),
    "a memory moved by a message that is left out": (
        "rounds/_clients.py",
        "new = kept_by_all(own.active, new, old)",
        "new = kept_by_all(group.cohort.active, new, old)",
        MEMORY,
    ),
    "what is relative to memories not rescaled": (
        FAULTY,
        "kernel.participation.weighted or holds_pooled_memory(kernel)",
        "kernel.participation.weighted",
        MEMORY,
    ),
    "a relay's gradients rescaled": (
        FAULTY,
        "kernel.participation.weighted or holds_pooled_memory(kernel)",
        "True",
        RELAY,
    ),
}
