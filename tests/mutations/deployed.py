"""Bugs of real sites that tests must notice; see `test_mutations`."""

LEFT_OUT = (
    "deploy/test_sites.py::test_a_site_that_does_not_answer_is_left_out_like_a_fault[dg_sgld]"
)
JOINS = "deploy/test_sites.py::test_a_site_that_joins_again_answers_again"
FAILED = "deploy/test_rounds.py::test_a_run_whose_server_fails_continues"
LEAVES_OUT = (
    "deploy/test_lying_sites.py::"
    "test_a_run_goes_on_without_a_site_that_lies_or_declines[not finite]"
)
OPERATOR = "deploy/test_endings.py::test_an_operator_counts_as_one_more_that_colludes"
WRONG = "deploy/test_sites.py::test_wrong_answers_of_a_site_do_not_change_a_run"
SIMULATED = (
    "deploy/test_rounds.py::test_sites_draw_what_a_simulation_does"
    "[compress: lsd_pp, memory: per client]"
)
CHAINED = "deploy/test_audit.py::test_the_first_line_that_was_changed_is_named"
LOGGED = "deploy/test_audit.py::test_answers_are_in_the_log_before_they_leave"
APPROVED = "deploy/test_approvals.py::test_a_site_refuses_a_study_that_changed_after_its_approval"
ASKED_FIRST = (
    "deploy/test_approvals.py::test_a_model_runs_once_and_after_its_owner_has_read_the_files"
)
SUMS_ALONE = "deploy/test_studies.py::test_a_study_that_is_none_is_refused"
ALIKE = (
    "deploy/attacks/test_dishonest_server.py::test_a_server_weighs_sites_by_numbers_of_its_kernel"
)
KNOWS = "deploy/test_sums.py::test_a_site_without_a_record_of_its_answers_does_not_start"
QUESTIONS = "exact/test_secure_questions.py::test_"
ZERO = f"{QUESTIONS}a_density_of_zero_stays_zero_in_a_secure_sum"
WALL = f"{QUESTIONS}a_chain_turns_back_at_a_wall_in_a_secure_sum[mala]"
NO_WORDS = f"{QUESTIONS}a_search_continues_at_numbers_that_are_not_representable[-inf]"
ANSWER = "deploy/test_masked_questions.py::test_an_answer_has_the_bits_of_a_simulated_secure_sum"
SECRETS = "deploy/test_secrets.py::test_"
DEPEND = f"{SECRETS}keys_of_clients_depend_on_all_that_a_step_depends_on"
STREAMS = "random/test_chacha.py::test_split_and_folded_keys_have_other_streams"
LIMITS = "deploy/test_limits.py::test_"

MUTATIONS = {
    "deploy/_site_run.py::SiteRun.settle": {
        "a site keeps what the server did not count": (
            "self.pending = self.state -> self.state = self.pending",
            LEFT_OUT,
        ),
        "a site forgets what was counted": (
            "self.state = self.pending -> self.pending = self.state",
            SIMULATED,
        ),
    },
    "deploy/_site_run.py::SiteRun.save": {
        "a site that was killed has not kept its last answer's state": (
            "self.pending -> self.state",
            JOINS,
        ),
    },
    "deploy/_site_run.py::SiteRun.resume": {
        "a site goes on from its last state, whatever the server's round": (
            "self.state = self.pending = self._decode_state(encoded) -> self._read(self.name)",
            FAILED,
        ),
    },
    "deploy/_links.py::Links.exchange": {
        "an answer of an earlier phase is taken": (
            "frame.header.get('tag') != list(tag)"
            " -> (frame.header.get('tag') or [0])[:1] != list(tag)[:1]",
            WRONG,
        ),
        "a site's reason reaches the terminal as it is": (
            "printable(frame.header.get('reason'), MAX_REASON_LENGTH)"
            " -> frame.header.get('reason')",
            "deploy/test_names.py::test_a_sites_reason_is_escaped",
        ),
    },
    "deploy/_programs.py::add_codes": {
        "the first client's message counts for all": (
            "jnp.stack(leaves) -> jnp.stack([leaves[0]] * len(leaves))",
            LEFT_OUT,
        ),
    },
    "deploy/_programs.py::shared_words": {
        "shared draws come from the chain's key": (
            "jax.vmap(lambda key: shared_key(key, number))(keys) -> keys",
            f"{SECRETS}of_all_keys_only_those_of_shared_draws_reach_a_site",
        ),
    },
    "deploy/_audit.py::verify_log": {
        "lines of the log do not follow one another": (
            "entry.get('previous') != previous -> entry.get('previous') is None",
            CHAINED,
        ),
        "lines cut off the log's end go unnoticed by who knows a hash": (
            "None if line_hash == holds else missing -> None",
            "deploy/test_audit.py::test_lines_cut_off_the_end_are_missed_by_who_knows_a_hash",
        ),
    },
    "deploy/_audit.py::_verified_hash": {
        "a line of the log is not held against its hash": (
            "stored if computed == stored else None -> stored",
            CHAINED,
        ),
    },
    "deploy/_site.py::Site.hello": {
        "the log has answers alone, and not what a site says when it calls": (
            "self._log.write('hello', **_log_entry(data)) -> self._log.write('hello')",
            LOGGED,
        ),
    },
    "deploy/_site.py::Site.answer": {
        "an answer is not in the log": (
            "self._log.write(kind, asked=request, **place, **_log_entry(answer))"
            " -> self._log.write(kind, asked=request, **place)",
            LOGGED,
        ),
    },
    "deploy/_site.py::Site.__init__": {
        "a digest that was approved is not compared": (
            "study.digest != approved -> not study.digest",
            APPROVED,
        ),
    },
    "deploy/_site.py::Site._step": {
        "chains of a round count as one": (
            "len(chains) * run.num_numbers[number] -> run.num_numbers[number]",
            f"{LIMITS}each_chain_counts",
        ),
    },
    "deploy/_site.py::Site._check_masks": {
        "a backup goes unnoticed under masks": (
            "num_stored is None or num_stored < num_logged -> num_stored is None",
            f"{LIMITS}a_backup_is_noticed_under_masks",
        ),
    },
    "deploy/_site.py::Site._keys": {
        "a client draws the same in all rounds": (
            "f'{tag.round} {tag.phase}' -> f'{tag.phase}'",
            DEPEND,
        ),
        "a client's draws do not depend on what it keeps": (
            "(run.digest, run.origin, place, body) -> (run.digest, place, body)",
            DEPEND,
        ),
    },
    "deploy/_approval.py::Approval.check": {
        "an approval is any site's": ("site != self.site -> not site", APPROVED),
        "an approval is of any study": (
            "study.digest == self.digest and software() == self.software"
            " -> software() == self.software",
            APPROVED,
        ),
        "an approval is of any version": (
            "study.digest == self.digest and software() == self.software"
            " -> study.digest == self.digest",
            APPROVED,
        ),
    },
    "deploy/_study.py::Study.to_dict": {
        "a study's digest leaves its files out": (
            "{name: source.digest for name, source in self._sources.items()}"
            " -> dict.fromkeys(self._sources, '')",
            APPROVED,
        ),
    },
    "deploy/_study.py::Study.kernel_of": {
        "a server may weigh sites apart under masks": (
            "check_same_for_sites(words) -> pass",
            ALIKE,
        ),
    },
    "deploy/_study.py::Study._check_classes": {
        "a server chooses its estimator": (
            "sorted(names & askable_estimators().keys() - {*self.asks}) -> ()",
            f"{LIMITS}a_server_needs_permission_for_minibatches[minibatch-True]",
        ),
    },
    "deploy/_sources.py::_Loader.get_code": {
        "a study's file is read again when it runs": (
            "self.source.text -> self.source.path.read_bytes()",
            "deploy/test_sources.py::test_a_source_swapped_after_it_was_hashed_does_not_run",
        ),
    },
    "deploy/_sources.py::search_path": {
        "a package is taken from the working directory": (
            "os.path.isabs(entry) and os.path.realpath(entry) not in excluded -> entry or excluded",
            "deploy/test_sources.py::test_a_folder_in_pythonpath_is_searched_wherever_a_program_starts",
        ),
    },
    "deploy/_commands.py::_approve": {
        "a study's files run before their owner has read them": (
            "options.yes or _agrees('Have you read the files, and may they run here?')"
            " -> study.kernel_digests",
            ASKED_FIRST,
        ),
        "what was shown and not approved is approved": (
            "options.yes or _agrees(f'Does {name} approve this study?') -> text",
            ASKED_FIRST,
        ),
    },
    "deploy/_masks.py::SUMS": {
        "under masks a server may ask without one site": (
            "each.hidden_in_sums -> each.hidden_in_sums or name == 'LeaveOneOutQuestion'",
            SUMS_ALONE,
        ),
    },
    "deploy/_masks.py::check_settings": {
        "under masks a server may ask anything": ("name not in SUMS -> not name", SUMS_ALONE),
    },
    "deploy/_masks.py::num_colluding": {
        "the operator's site does not count as colluding": (
            "colluding + ('operator' in secure) -> colluding",
            OPERATOR,
        ),
    },
    "deploy/_masks.py::DEFAULT_RESOLUTION": {
        "questions are rounded to a coarser grid": ("-22 -> -12", ANSWER),
    },
    "deploy/_rules.py::SiteRules._read": {
        "a site that has forgotten what it answered begins anew": (
            "self._marker.exists() -> not self._path.name",
            KNOWS,
        ),
    },
    "kernels/_questions.py::impossible_in_sum": {
        "a density of zero is read as the lowest number": (
            "-trees.cast(limit, value) / 2 -> -trees.cast(limit, value) * 1000000000.0",
            ZERO,
        ),
    },
    "kernels/_adjusted.py::Proposed.to_range": {
        "a density of zero is sent as the highest number": (
            "-trees.cast(limit, value) -> trees.cast(limit, value)",
            WALL,
        ),
    },
    "kernels/_expansions.py::Expanded.from_range": {
        "a place without numbers in the range is one of a mode": ("-jnp.inf -> 0.0", NO_WORDS),
    },
    "deploy/_rounds.py::Rounds._run_phase": {
        "a site that is left out of a chain counts there": (
            "~((ids == fault.site) & fault.chains) -> True",
            LEAVES_OUT,
        ),
    },
    "deploy/_limits.py::Outflow.__init__": {
        "a folder that was removed begins to count again": (
            "max(disk.num_numbers, 0 if log is None else log.num_numbers) -> disk.num_numbers",
            f"{LIMITS}a_count_outlives_the_folder[removed]",
        ),
    },
    "deploy/_limits.py::Limits.check_run": {
        "minibatches may be of any size": (
            "rows is not None and rows < smallest -> rows == 0",
            f"{LIMITS}minibatches_of_the_study_are_not_small[True]",
        ),
    },
    "deploy/_secret.py::SiteSecret._digest": {
        "all chains draw the same": ("str(chain).encode() -> b''", DEPEND),
        "a site's keys do not depend on its secret": (
            "self._secret -> b''",
            f"{SECRETS}a_secret_is_made_once_and_for_its_owner_alone",
        ),
    },
    "random/_chacha.py::_split": {
        "split keys are of the stream of bits": (
            "_words(key, _SPLIT, 0, num * KEY_WORDS) -> _words(key, _BITS, 0, num * KEY_WORDS)",
            STREAMS,
        ),
    },
}
