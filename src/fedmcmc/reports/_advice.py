"""Advice on the use of a fit's results."""

ADVICE = {
    "passed": "These results can be used. They were computed without pooling rows. They do not "
    "show whether the model is right.",
    "doubtful": "Use these results with care: they look right, but this could not be confirmed.",
    "approximate": "Do not report these numbers as the posterior: they come from a Gaussian "
    "approximation and may be far off.",
    "failed": "Do not use these numbers.",
}


def advice(verdict: str) -> str:
    """Return advice on the results of a fit from the first word of its verdict.

    Examples
    --------
    >>> advice("failed: no mode was found")
    'Do not use these numbers.'
    """
    return ADVICE[verdict.split(" ")[0].rstrip(":")]
