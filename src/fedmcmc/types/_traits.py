"""Properties of kernels that runs and transforms act on, and the disclosure of messages."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CompressorCheck = Callable[[Any, Any], None]
"""``(kernel, compressor)``; raises `ValueError` if compressed messages would make draws wrong."""


def any_compressor(kernel: object, compressor: object) -> None:
    """Accept every compressor."""


@dataclass(frozen=True)
class Traits:
    """Properties of a kernel that runs and transforms act on.

    A transform copies the traits of the wrapped kernel and changes some of them
    (`dataclasses.replace`).

    Attributes
    ----------
    approximates
        If true, draws are independent draws from an approximation that the kernel refines.
    has_local_steps
        If true, clients move their own positions over many gradients per round.
    needs_all_clients
        If true, a round counts only if its sum contains the message of every client.
    phases_independent
        If true, a client may answer one phase of a round and miss the next.
    accepts_late_messages
        If true, a message that arrives one round late may still be added.
    divergence_hint
        Cause of a divergence other than the step size, with its remedy; empty without such a cause.
    keeps_latents
        If true, clients keep latents of their groups (`FederatedKernel.model` has a `local` part).
    gradients_at_latents
        If true, messages are gradients at the latents of the clients' groups, so that the step size
        biases draws.
    visits_clients
        If true, one client per round moves the chain, and one over its probability multiplies its
        gradient.
    refits_surrogates
        If true, clients replace their surrogates during the run.
    noise_in_messages
        If true, clients add the noise of the chain to their messages, so that the noise of a sum
        without one of them has the wrong variance.
    marks_range_ends
        If true, answers mark the places of numbers outside the range of a secure sum. All other
        messages with such numbers become random words at a site.
    no_target_reason
        Reason why `FederatedKernel.target` is ``None``, such as ``"it trains and does not
        sample"``. Without both, a long run warns that its draws were compared with nothing.
    check_compressor
        ``(kernel, compressor)``; raises `ValueError` if compressed messages would make draws wrong.
    """

    approximates: bool = False
    has_local_steps: bool = False
    needs_all_clients: bool = False
    phases_independent: bool = True
    accepts_late_messages: bool = True
    divergence_hint: str = ""
    keeps_latents: bool = False
    gradients_at_latents: bool = False
    visits_clients: bool = False
    refits_surrogates: bool = False
    noise_in_messages: bool = False
    marks_range_ends: bool = False
    no_target_reason: str = ""
    check_compressor: CompressorCheck = any_compressor


@dataclass(frozen=True)
class Disclosure:
    """Information about a client's rows in the messages of a kernel or gradient estimator.

    The text that a site's owner approves and the rules for secure sums are built from it.

    Attributes
    ----------
    content
        Content of a client's message, in words for the owner of a site.
    hidden_in_sums
        If true, a sum of messages over clients reveals nothing about a single client, whatever a
        dishonest server broadcasts. Under secure sums, a server may request only such kernels.
    reason
        Reason why `hidden_in_sums` is false.
    warning
        Warning for the owner of a site; ``{rows}`` stands for the rows that messages reveal.
    """

    content: str = "see this class in fedmcmc"
    hidden_in_sums: bool = False
    reason: str = "nobody has studied what its sums reveal about one site"
    warning: str = ""
