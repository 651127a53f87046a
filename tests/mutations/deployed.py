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
REFUSALS = "deploy/test_refusals.py::test_"
CHAINED = f"{REFUSALS}a_log_is_wrong_from_the_line_that_was_changed"
LOGGED = f"{REFUSALS}a_log_has_all_bytes_that_left_before_they_do"
APPROVED = f"{REFUSALS}a_site_takes_the_study_that_was_approved_and_no_other"
ASKED_FIRST = f"{REFUSALS}a_study_runs_once_its_owner_has_said_so"
SUMS_ALONE = f"{REFUSALS}a_study_under_masks_may_ask_for_sums_alone"
ALIKE = f"{REFUSALS}a_site_under_masks_takes_kernels_that_treat_sites_alike"
KNOWS = f"{REFUSALS}a_site_answers_as_long_as_it_knows_what_it_answered"
QUESTIONS = "exact/test_secure_questions.py::test_"
ZERO = f"{QUESTIONS}a_density_of_zero_is_one_in_a_secure_sum"
WALL = f"{QUESTIONS}a_chain_turns_back_at_a_wall_in_a_secure_sum[mala]"
NO_WORDS = f"{QUESTIONS}a_search_does_not_end_where_numbers_have_no_words[-inf]"
ANSWER = "deploy/test_masked_questions.py::test_an_answer_has_the_bits_of_a_simulated_secure_sum"
AUDIT, APPROVAL, MASKS = "deploy/_audit.py", "deploy/_approval.py", "deploy/_masks.py"

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
        "deploy/_programs.py",
        "lambda *leaves: jnp.stack(leaves), *codes)",
        "lambda *leaves: jnp.stack([leaves[0]] * len(leaves)), *codes)",
        LEFT_OUT,
    ),
    "lines of the log do not follow one another": (
        AUDIT,
        'if entry.get("previous") != last:',
        'if entry.get("previous") is None:',
        CHAINED,
    ),
    "a line of the log is not held against its hash": (
        AUDIT,
        'return own if hashlib.sha256(line[: end.start()] + b"}").hexdigest() == own else None',
        "return own",
        CHAINED,
    ),
    "lines cut off the log's end go unnoticed by who knows a hash": (
        AUDIT,
        "missing = None if found == holds else missing",
        "missing = None",
        CHAINED,
    ),
    "the log has answers alone, and not what a site says when it calls": (
        "deploy/_site.py",
        'self._log.write("hello", **_sent(data))',
        'self._log.write("hello")',
        LOGGED,
    ),
    "an answer is not in the log": (
        "deploy/_site.py",
        "**where, **_sent(answer))",
        "**where)",
        LOGGED,
    ),
    "an approval is any site's": (APPROVAL, "if site != self.site:", "if not site:", APPROVED),
    "an approval is of any study": (
        APPROVAL,
        "if study.digest == self.digest and software()",
        "if software()",
        APPROVED,
    ),
    "an approval is of any version": (
        APPROVAL,
        " and software() == self.software:",
        ":",
        APPROVED,
    ),
    "a digest that was approved is not compared": (
        "deploy/_site.py",
        "elif approved is not None and study.digest != approved:",
        "elif approved is not None and not study.digest:",
        APPROVED,
    ),
    "a study's digest leaves its files out": (
        "deploy/_study.py",
        '"files": {where: self._hash(where) for where in self.sources},',
        '"files": {where: "" for where in self.sources},',
        APPROVED,
    ),
    "a study's files run before their owner has read them": (
        "deploy/_commands.py",
        'if not (given.yes or _agrees("Have you read the files, and may they run here?")):',
        "if not study.kernel_digests:",
        ASKED_FIRST,
    ),
    "what was shown and not approved is approved": (
        "deploy/_commands.py",
        'if not (given.yes or _agrees(f"Does {name} approve this study?")):',
        "if not told:",
        ASKED_FIRST,
    ),
    "under masks a server may ask without one site": (
        MASKS,
        '"Evaluations",',
        '"AllBut",\n    "Evaluations",',
        SUMS_ALONE,
    ),
    "under masks a server may ask anything": (
        MASKS,
        "if name not in SUMS:",
        "if not name:",
        SUMS_ALONE,
    ),
    "a server may weigh sites apart under masks": (
        "deploy/_study.py",
        "            check_alike(words)\n",
        "            pass\n",
        ALIKE,
    ),
    "a site that has forgotten what it answered begins anew": (
        "deploy/_rules.py",
        "if self._begun.exists():",
        "if not self._path.name:",
        KNOWS,
    ),
    "a density of zero is read as the lowest number": (
        "kernels/_questions.py",
        "return value < -trees.cast(most, value) / 2",
        "return value < -trees.cast(most, value) * 1e9",
        ZERO,
    ),
    "a density of zero is sent as the highest number": (
        "kernels/_adjusted.py",
        "value=Exact(jnp.where(impossible, -trees.cast(most, value), value)),",
        "value=Exact(jnp.where(impossible, trees.cast(most, value), value)),",
        WALL,
    ),
    "a place without numbers in the range is one of a mode": (
        "kernels/_expansions.py",
        "value=jnp.where(impossible, -jnp.inf, total.value)",
        "value=jnp.where(impossible, 0.0, total.value)",
        NO_WORDS,
    ),
    "questions are rounded to a coarser grid": (
        MASKS,
        "RESOLUTION, MOST = 2.0**-22,",
        "RESOLUTION, MOST = 2.0**-12,",
        ANSWER,
    ),
}
