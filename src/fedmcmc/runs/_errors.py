"""Errors that carry what a run has sampled."""

from typing import Any

__all__ = ["NonFiniteError"]


class NonFiniteError(FloatingPointError):
    """The state of a chain turned infinite or not-a-number.

    Attributes
    ----------
    samples
        The `fedmcmc.Samples` kept before the first non-finite round.
    round
        The first non-finite round.
    chains
        The chains that are not finite.
    """

    def __init__(self, message: str, samples: Any, round_: int, chains: list[int]) -> None:
        super().__init__(message)
        self.samples = samples
        self.round = round_
        self.chains = chains
