"""What settings of experiments must be, said in one message before anything runs."""

from typing import Any

__all__ = ["at_least", "between", "bits", "chains", "positive", "require", "rounds"]


def require(condition: bool, message: str, value: Any) -> None:
    """Raise `ValueError` with what is expected and the value that was given."""
    if not condition:
        raise ValueError(f"{message}, got {value}.")


def at_least(least: int, config: Any, *names: str) -> None:
    """Raise unless these settings are at least `least`."""
    for name in names:
        require(
            getattr(config, name) >= least,
            f"{name} must be at least {least}",
            getattr(config, name),
        )


def positive(config: Any, *names: str) -> None:
    """Raise unless these settings are positive."""
    for name in names:
        require(getattr(config, name) > 0, f"{name} must be positive", getattr(config, name))


def between(low: float, high: float, config: Any, *names: str, why: str = "") -> None:
    """Raise unless these settings lie strictly between two numbers."""
    for name in names:
        value = getattr(config, name)
        require(low < value < high, f"{name} must lie in ({low}, {high}){why}", value)


def bits(given: tuple[int, ...]) -> None:
    """Raise unless each `p` of ``2**p`` levels is one that a quantiser takes."""
    require(
        len(given) > 0 and min(given) >= 0 and max(given) <= 23,
        "bits must lie between 0 and 23",
        given,
    )


def chains(config: Any) -> None:
    """Raise unless there are chains enough for a standard error."""
    at_least(2, config, "num_chains")


def rounds(config: Any) -> None:
    """Raise unless the rounds after burn-in hold a draw."""
    require(
        0 <= config.num_burnin <= config.num_rounds - config.thinning,
        "num_burnin must leave at least `thinning` of num_rounds",
        config.num_burnin,
    )
