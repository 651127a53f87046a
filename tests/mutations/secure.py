"""Bugs of secure sums that their tests must notice; see `test_mutations`."""

SUM = "compression/test_words.py::test_a_sum_agrees_with_numpy_in_any_order_and_any_split[300]"
BITS = "compression/test_words.py::test_words_have_the_bits_of_numpy[32-1.0]"
DECODED = (
    "compression/test_words.py::"
    "test_decoding_keeps_seven_digits_on_both_sides_of_zero_and_of_two_to_the_32"
)
WEIGHTS = (
    "transforms/test_secure.py::test_faults_of_a_secure_sum_are_those_of_the_plain_kernel[False]"
)
SITES = "transforms/test_secure.py::test_sites_sum_to_the_global_gaussian_as_the_server_reads_it"
MASKS = "deploy/test_sums.py::test_masks_cancel[3]"
SINGLED_OUT = "deploy/test_masks.py::test_what_would_single_out_a_message_is_not_answered"
ASKED = "deploy/test_sums.py::test_sites_that_were_asked_different_things_do_not_add_up"
WORDS, SECURE = "compression/_words.py", "transforms/_secure.py"

MUTATIONS = {
    "words rounded down": (
        WORDS,
        "scaled = jnp.round(numbers.astype(jnp.float32) * 2.0**self.digits)",
        "scaled = jnp.floor(numbers.astype(jnp.float32) * 2.0**self.digits)",
        BITS,
    ),
    "words split before they are rounded": (
        WORDS,
        "low = _bits((scaled - top * 2.0**24).astype(jnp.int32))",
        "low = _bits((numbers * 2.0**self.digits - top * 2.0**24).astype(jnp.int32))",
        BITS,
    ),
    "a carry lost": (WORDS, "Word(total.high + (middle >> 16)", "Word(total.high", SUM),
    "sums below zero read as they are": (
        WORDS,
        "negative = high >> 31 == 1",
        "negative = high >> 31 == 2",
        DECODED,
    ),
    "words not weighted": (
        SECURE,
        "message = importance(client, message)",
        "message = importance(client, message) if False else message",
        WEIGHTS,
    ),
    "words weighted by the runner": (
        SECURE,
        "return Secured(kernel, replace(participation, weighted=False), grid)",
        "return Secured(kernel, participation, grid)",
        WEIGHTS,
    ),
    "a site that keeps what it did not send": (
        SECURE,
        "self.inner.commit(self.read(message, broadcast), broadcast, client_state)",
        "self.inner.commit(trees.scale(1.05, self.read(message, broadcast)), broadcast,"
        " client_state)",
        SITES,
    ),
    "both sites of a pair add their mask": (
        "deploy/_sums.py",
        "if peer > session.index:",
        "if peer != session.index:",
        MASKS,
    ),
    "a site lets its message weigh more": (
        "deploy/_site.py",
        "all(active) and all(w == 1 for w in weights)",
        "all(active)",
        SINGLED_OUT,
    ),
    "masks do not depend on what is asked": (
        "deploy/_session.py",
        "return replace(self, pair_keys=keys)",
        "return replace(self, pair_keys=self.pair_keys)",
        ASKED,
    ),
}
