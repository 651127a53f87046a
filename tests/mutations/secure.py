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
SINGLED_OUT = "deploy/test_masks.py::test_a_request_that_singles_out_a_message_is_declined"
ASKED = "deploy/test_sums.py::test_masks_of_different_questions_do_not_cancel"

MUTATIONS = {
    "compression/_words.py::Grid.encode": {
        "words rounded down": (
            "jnp.round(numbers.astype(jnp.float32) * 2.0 ** self.digits)"
            " -> jnp.floor(numbers.astype(jnp.float32) * 2.0 ** self.digits)",
            BITS,
        ),
        "words split before they are rounded": (
            "scaled - top * 2.0 ** 24 -> numbers * 2.0 ** self.digits - top * 2.0 ** 24",
            BITS,
        ),
    },
    "compression/_words.py::carry": {
        "a carry lost": ("total.high + (middle >> 16) -> total.high", SUM),
    },
    "compression/_words.py::Grid.decode": {
        "sums below zero read as they are": ("high >> 31 == 1 -> high >> 31 == 2", DECODED),
    },
    "transforms/_secure.py::_Summed.step": {
        "words not weighted": ("importance(client, message) -> message", WEIGHTS),
    },
    "transforms/_secure.py::secure_sum": {
        "words weighted by the runner": (
            "replace(participation, weighted=False) -> participation",
            WEIGHTS,
        ),
    },
    "transforms/_secure.py::_Summed.commit": {
        "a site that keeps what it did not send": (
            "self.read(message, broadcast) -> trees.scale(1.05, self.read(message, broadcast))",
            SITES,
        ),
    },
    "deploy/_sums.py::mask": {
        "both sites of a pair add their mask": (
            "peer > session.index -> peer != session.index",
            MASKS,
        ),
    },
    "deploy/_site.py::Site._step": {
        "a site lets its message weigh more": (
            "all(active) and all((w == 1 for w in weights)) -> all(active)",
            SINGLED_OUT,
        ),
    },
    "deploy/_session.py::Session.bound_to": {
        "masks do not depend on what is asked": (
            "replace(self, pair_keys=keys) -> replace(self, pair_keys=self.pair_keys)",
            ASKED,
        ),
    },
}
