"""Bugs of what runs share and of what they keep that tests must notice; see `test_mutations`."""

TOGETHER = "test_side_by_side.py::test_results_are_those_of_functions_by_themselves[1073741824-1]"
PIECES = "test_checkpoints.py::test_a_run_in_pieces_is_one_run[plain-npz]"
TESTS = [TOGETHER, PIECES]
FILES = ["killed_run.py", "kills.py", "test_checkpoints.py", "test_side_by_side.py"]
SIDE = "_calls.py"

MUTATIONS = {
    "all functions get the first one's chains": (
        SIDE,
        "chains = slice(i * len(call.run.keys), (i + 1) * len(call.run.keys))",
        "chains = slice(len(call.run.keys))",
        TOGETHER,
    ),
    "all functions have the first one's rows": (
        SIDE,
        "on = [(run.data, run.keys) for run in some]",
        "on = [(runs[0].data, run.keys) for run in some]",
        TOGETHER,
    ),
    "all functions have the first one's keys": (
        SIDE,
        "on = [(run.data, run.keys) for run in some]",
        "on = [(run.data, runs[0].keys) for run in some]",
        TOGETHER,
    ),
    "all functions have the first one's settings": (
        SIDE,
        "kernels, first = [run.kernel for run in some], runs[0].first",
        "kernels, first = [runs[0].kernel for run in some], runs[0].first",
        TOGETHER,
    ),
    "all functions start where the first does": (
        SIDE,
        "*[run.state for run in some]",
        "*[runs[0].state for run in some]",
        TOGETHER,
    ),
    "totals before a checkpoint forgotten": (
        "_run.py",
        "self.totals, self.stopped = saved.totals, saved.stopped",
        "self.stopped = saved.stopped",
        PIECES,
    ),
    "a run goes on from the checkpoint's round in the first state": (
        "_run.py",
        "self._restore(saved.state)",
        "",
        PIECES,
    ),
}
