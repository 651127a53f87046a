"""Bugs of what runs keep that tests must notice; see `test_mutations`."""

PIECES = "storage/test_checkpoints.py::test_a_run_in_pieces_is_one_run[plain]"

MUTATIONS = {
    "runs/_run.py::Run._resume": {
        "totals before a checkpoint forgotten": (
            "saved._replace -> saved._replace(totals=progress.totals)._replace",
            PIECES,
        ),
        "a run goes on from the checkpoint's round in the first state": (
            "executor.lay_out(saved.state) -> progress.state",
            PIECES,
        ),
    },
}
