"""Bugs of what runs keep that tests must notice; see `test_mutations`."""

PIECES = "storage/test_checkpoints.py::test_a_run_in_pieces_is_one_run[plain]"

MUTATIONS = {
    "totals before a checkpoint forgotten": (
        "runs/_run.py",
        "self.progress = saved._replace(",
        "self.progress = saved._replace(totals=progress.totals,",
        PIECES,
    ),
    "a run goes on from the checkpoint's round in the first state": (
        "runs/_run.py",
        "state=executor.lay_out(saved.state),",
        "state=progress.state,",
        PIECES,
    ),
}
