"""What a verdict means for who is to use the numbers."""

ADVICE = {
    "passed": "These results can be used. They were computed without pooling rows, and they say "
    "nothing about whether the model is right.",
    "doubtful": "Use these results with care: they look right, and nothing shows that they are.",
    "approximate": "Do not report these numbers as the posterior: they are those of a Gaussian "
    "approximation, and may be far off.",
    "failed": "Do not use these numbers.",
}


def advice(verdict: str) -> str:
    """Return what to do with the results of a fit, by the first word of its verdict.

    Examples
    --------
    >>> advice("failed: no mode was found")
    'Do not use these numbers.'
    """
    return ADVICE[verdict.split(" ")[0].rstrip(":")]
