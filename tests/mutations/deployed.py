"""Bugs of real sites that tests must notice; see `test_mutations`."""

LEFT_OUT = (
    "deploy/test_sites.py::test_a_site_that_does_not_answer_is_left_out_as_by_a_fault[dg_sgld]"
)
JOINS = "deploy/test_sites.py::test_a_site_joins_again_in_the_middle_and_is_asked_again"
INTERRUPTED = "deploy/test_rounds.py::test_a_run_that_was_interrupted_goes_on"
WRONG = "deploy/test_sites.py::test_what_a_site_sends_wrongly_does_not_change_a_run"
SIMULATED = (
    "deploy/test_rounds.py::test_sites_draw_what_a_simulation_does"
    "[compress: lsd_pp, memory: per client]"
)
TESTS = [LEFT_OUT, JOINS, INTERRUPTED, WRONG, SIMULATED]

MUTATIONS = {
    "a site keeps what the server did not count": (
        "deploy/_site.py",
        "            run.pending = run.state\n            return\n",
        "            run.state = run.pending\n            return\n",
        LEFT_OUT,
    ),
    "a site forgets what was counted": (
        "deploy/_site.py",
        "        run.state = run.pending\n\n",
        "        run.pending = run.state\n\n",
        SIMULATED,
    ),
    "a site that was killed has not kept its last answer's state": (
        "deploy/_site.py",
        "wire.encode([run.state]), wire.encode([run.pending])",
        "wire.encode([run.state]), wire.encode([run.state])",
        JOINS,
    ),
    "a site goes on from its last state, whatever the server's round": (
        "deploy/_site.py",
        "run.state = run.pending = self._states(run, marked)",
        "self._read_state(run)",
        INTERRUPTED,
    ),
    "an answer of an earlier phase is taken": (
        "deploy/_links.py",
        'frame.header.get("tag") != list(tag)',
        '(frame.header.get("tag") or [0])[:1] != list(tag)[:1]',
        WRONG,
    ),
    "the first client's message counts for all": (
        "deploy/_rounds.py",
        "lambda leaf: leaf[ids, np.arange(ids.shape[1])], codes)",
        "lambda leaf: leaf[0 * ids, np.arange(ids.shape[1])], codes)",
        LEFT_OUT,
    ),
}
