"""Bugs of real sites that tests must notice; see `test_mutations`."""

LEFT_OUT = (
    "deploy/test_sites.py::test_a_site_that_does_not_answer_is_left_out_as_by_a_fault[dg_sgld]"
)
JOINS = "deploy/test_sites.py::test_a_site_joins_again_in_the_middle_and_is_asked_again"
FAILED = "deploy/test_rounds.py::test_a_run_whose_server_fails_goes_on"
LEAVES_OUT = (
    "deploy/test_lying_sites.py::"
    "test_a_run_goes_on_without_a_site_that_lies_or_declines[not finite]"
)
OPERATOR = "deploy/test_endings.py::test_an_operator_counts_as_one_more_that_colludes"
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
SECRETS = "deploy/test_secrets.py::test_"
DEPEND = f"{SECRETS}keys_of_clients_depend_on_all_that_a_step_depends_on"
SECRET, CHACHA = "deploy/_secret.py", "random/_chacha.py"
STREAMS = "random/test_chacha.py::test_split_and_folded_keys_have_other_streams"
LIMITS = "deploy/test_limits.py::test_"
TRANSPORT = "deploy/test_transport.py::test_"
SITE_RUN = "deploy/_site_run.py"
AUDIT, APPROVAL, MASKS = "deploy/_audit.py", "deploy/_approval.py", "deploy/_masks.py"

MUTATIONS = {
    "a site keeps what the server did not count": (
        SITE_RUN,
        "            self.pending = self.state\n            return\n",
        "            self.state = self.pending\n            return\n",
        LEFT_OUT,
    ),
    "a site forgets what was counted": (
        SITE_RUN,
        "        self.state = self.pending\n\n",
        "        self.pending = self.state\n\n",
        SIMULATED,
    ),
    "a site that was killed has not kept its last answer's state": (
        SITE_RUN,
        "self.encode(self.state), self.encode(self.pending)",
        "self.encode(self.state), self.encode(self.state)",
        JOINS,
    ),
    "a site goes on from its last state, whatever the server's round": (
        SITE_RUN,
        "self.state = self.pending = self._decode_state(encoded)",
        "self._read(self.name)",
        FAILED,
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
        'if entry.get("previous") != previous:',
        'if entry.get("previous") is None:',
        CHAINED,
    ),
    "a line of the log is not held against its hash": (
        AUDIT,
        "return stored if computed == stored else None",
        "return stored",
        CHAINED,
    ),
    "lines cut off the log's end go unnoticed by who knows a hash": (
        AUDIT,
        "missing = None if line_hash == holds else missing",
        "missing = None",
        CHAINED,
    ),
    "the log has answers alone, and not what a site says when it calls": (
        "deploy/_site.py",
        'self._log.write("hello", **_log_entry(data))',
        'self._log.write("hello")',
        LOGGED,
    ),
    "an answer is not in the log": (
        "deploy/_site.py",
        "**place, **_log_entry(answer))",
        "**place)",
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
        '"files": {name: source.digest for name, source in self._sources.items()},',
        '"files": dict.fromkeys(self._sources, ""),',
        APPROVED,
    ),
    "a study's file is read again when it runs": (
        "deploy/_sources.py",
        "compile(self.source.text, ",
        "compile(self.source.path.read_bytes(), ",
        f"{REFUSALS}a_source_runs_as_it_was_hashed",
    ),
    "a package is taken from the working directory": (
        "deploy/_sources.py",
        "if os.path.isabs(entry) and os.path.realpath(entry) not in excluded",
        "if entry or excluded",
        f"{REFUSALS}a_package_is_not_taken_from_the_working_directory",
    ),
    "a site's reason reaches the terminal as it is": (
        "deploy/_links.py",
        'problem = printable(frame.header.get("reason"), MAX_REASON_LENGTH)',
        'problem = frame.header.get("reason")',
        f"{REFUSALS}a_reason_has_printable_characters_alone",
    ),
    "a study's files run before their owner has read them": (
        "deploy/_commands.py",
        'if not (options.yes or _agrees("Have you read the files, and may they run here?")):',
        "if not study.kernel_digests:",
        ASKED_FIRST,
    ),
    "what was shown and not approved is approved": (
        "deploy/_commands.py",
        'if not (options.yes or _agrees(f"Does {name} approve this study?")):',
        "if not text:",
        ASKED_FIRST,
    ),
    "under masks a server may ask without one site": (
        MASKS,
        "if each.hidden_in_sums)",
        'if each.hidden_in_sums or name == "LeaveOneOutQuestion")',
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
        "            check_same_for_sites(words)\n",
        "            pass\n",
        ALIKE,
    ),
    "a site that has forgotten what it answered begins anew": (
        "deploy/_rules.py",
        "if self._marker.exists():",
        "if not self._path.name:",
        KNOWS,
    ),
    "a density of zero is read as the lowest number": (
        "kernels/_questions.py",
        "return value < -trees.cast(limit, value) / 2",
        "return value < -trees.cast(limit, value) * 1e9",
        ZERO,
    ),
    "a density of zero is sent as the highest number": (
        "kernels/_adjusted.py",
        "value=Uncompressed(jnp.where(impossible, -trees.cast(limit, value), value)),",
        "value=Uncompressed(jnp.where(impossible, trees.cast(limit, value), value)),",
        WALL,
    ),
    "a place without numbers in the range is one of a mode": (
        "kernels/_expansions.py",
        "value=jnp.where(impossible, -jnp.inf, self.value)",
        "value=jnp.where(impossible, 0.0, self.value)",
        NO_WORDS,
    ),
    "a site that is left out of a chain counts there": (
        "deploy/_rounds.py",
        "active = active & ~((ids == fault.site) & fault.chains)",
        "active = active & True",
        LEAVES_OUT,
    ),
    "the operator's site does not count as colluding": (
        MASKS,
        'return colluding + ("operator" in secure)',
        "return colluding",
        OPERATOR,
    ),
    "chains of a round count as one": (
        "deploy/_site.py",
        "num_numbers = len(chains) * run.num_numbers[number]",
        "num_numbers = run.num_numbers[number]",
        f"{LIMITS}chains_count_each_by_itself",
    ),
    "a folder that was removed begins to count again": (
        "deploy/_limits.py",
        "self._record(max(disk.num_numbers, 0 if log is None else log.num_numbers))",
        "self._record(disk.num_numbers)",
        f"{LIMITS}a_count_outlives_the_folder[removed]",
    ),
    "a backup goes unnoticed under masks": (
        "deploy/_site.py",
        "(num_stored is None or num_stored < num_logged)",
        "num_stored is None",
        f"{LIMITS}a_backup_is_noticed_under_masks",
    ),
    "minibatches may be of any size": (
        "deploy/_limits.py",
        "if rows is not None and rows < smallest:",
        "if rows == 0:",
        f"{LIMITS}minibatches_of_the_study_are_not_small[True]",
    ),
    "a server chooses its estimator": (
        "deploy/_study.py",
        "for name in sorted(names & askable_estimators().keys() - {*self.asks}):",
        "for name in ():",
        f"{LIMITS}a_server_asks_of_all_rows[minibatch-True]",
    ),
    "questions are rounded to a coarser grid": (
        MASKS,
        "DEFAULT_RESOLUTION, DEFAULT_MOST = 2.0**-22,",
        "DEFAULT_RESOLUTION, DEFAULT_MOST = 2.0**-12,",
        ANSWER,
    ),
    "a client draws the same in all rounds": (
        "deploy/_site.py",
        'place = f"{tag.round} {tag.phase}"',
        'place = f"{tag.phase}"',
        DEPEND,
    ),
    "all chains draw the same": (SECRET, "str(chain).encode()", 'b""', DEPEND),
    "a client's draws do not depend on what it keeps": (
        "deploy/_site.py",
        "sources = (run.digest, run.origin, place, body)",
        "sources = (run.digest, place, body)",
        DEPEND,
    ),
    "a site's keys do not depend on its secret": (
        SECRET,
        "hmac.digest(self._secret,",
        'hmac.digest(b"",',
        f"{SECRETS}a_secret_is_made_once_and_for_its_owner_alone",
    ),
    "shared draws come from the chain's key": (
        "deploy/_programs.py",
        "jax.vmap(lambda key: shared_key(key, number))(keys)",
        "keys",
        f"{SECRETS}of_all_keys_only_those_of_shared_draws_reach_a_site",
    ),
    "split keys are of the stream of bits": (
        CHACHA,
        "_words(key, _SPLIT, 0,",
        "_words(key, _BITS, 0,",
        STREAMS,
    ),
}
