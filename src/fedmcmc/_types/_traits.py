"""Properties of kernels that runs and transforms act on, and what messages disclose."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CompressorCheck = Callable[[Any, Any], None]
"""``(kernel, compressor)``; raises `ValueError` if compressed messages would make draws wrong."""


def any_compressor(kernel: Any, compressor: Any) -> None:
    """Accept every compressor."""


@dataclass(frozen=True)
class Traits:
    """Properties of a kernel that runs and transforms act on.

    A transform copies the traits of the kernel that it wraps and changes those that it must
    (`dataclasses.replace`).

    Attributes
    ----------
    approximates
        Whether draws are independent draws from an approximation that the kernel refines.
    has_local_steps
        Whether clients move positions of their own over many gradients per round.
    needs_all_clients
        Whether a round counts only if the message of every client is in its sum.
    phases_independent
        Whether a client may answer one phase of a round and miss the next.
    accepts_late_messages
        Whether a message that arrives one round late may still be added.
    divergence_hint
        Cause of a divergence other than the step size, with its remedy; empty if there is none.
    keeps_latents
        Whether clients keep latents of their groups, which `FederatedKernel.model` has as `local`.
    marks_range_ends
        Whether answers with numbers outside the range of a secure sum keep marks of these places.
        All other messages with such numbers become random words at a site.
    no_target_reason
        Reason why `FederatedKernel.target` is ``None``, such as ``"it trains and does not
        sample"``. If it is empty too, a long run warns that its draws were compared with nothing.
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
    marks_range_ends: bool = False
    no_target_reason: str = ""
    check_compressor: CompressorCheck = any_compressor


@dataclass(frozen=True)
class Disclosure:
    """What the messages of a kernel or gradient estimator tell about the rows of a client.

    The text that the owner of a site approves is made of these, and the rules for secure sums.

    Attributes
    ----------
    content
        Content of a client's message, in words for the owner of a site.
    hidden_in_sums
        Whether a sum of messages over clients says nothing about a single client, whatever a
        dishonest server broadcasts. A server may ask for such kernels alone under secure sums.
    reason
        Reason why `hidden_in_sums` is false.
    warning
        Warning for the owner of a site; ``{rows}`` stands for the rows that messages reveal.
    """

    content: str = "see this class in fedmcmc"
    hidden_in_sums: bool = False
    reason: str = "nobody has studied what its sums tell about one site"
    warning: str = ""
