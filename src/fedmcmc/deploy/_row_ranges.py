"""Numbers of rows of sites, which a study may give as ranges.

Owners approve the range. Each site reports its number of rows when it joins, and the server sends
the numbers of all sites at the beginning of each run.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedmcmc.deploy._frames import FrameError, Refused, printable

SHARED = ("_sources", "_modules", "model", "_built", "kernel_digests")
"""Results of a study that do not depend on numbers of rows."""
RowRange = tuple[int, int]
"""Smallest and largest number of rows of a site."""


def read_sites(sites: Any, row_ranges: Mapping[str, RowRange]) -> dict[str, Any]:
    """Return the arguments `sites` and `row_ranges` of a study from its table of sites.

    A site with a range has the largest number in `sites`, until the sites have joined. Raise
    `ValueError` unless numbers are valid.
    """
    if not isinstance(sites, Mapping) or not sites:
        raise ValueError(
            f"sites must be a mapping from names to numbers of rows, such as "
            f'{{"bern": 120, "basel": [60, 90]}}, got {sites!r}.'
        )
    numbers, ranges = {}, dict(row_ranges)
    for site, num in sites.items():
        pair = list(num) if isinstance(num, list | tuple) else [num, num]
        is_valid = len(pair) == 2 and all(type(x) is int and x > 0 for x in pair)
        if not isinstance(site, str) or not site or not is_valid or pair[0] > pair[1]:
            raise ValueError(
                f"sites must give each site's number of rows, a whole number of at least 1, got "
                f"{num!r} for {site!r}. A range is the smallest and the largest number: [60, 90]."
            )
        numbers[site] = pair[1]
        if type(num) is not int:
            ranges[site] = (pair[0], pair[1])
    return {"sites": numbers, "row_ranges": ranges}


def agreed_sites(study: Any) -> dict[str, Any]:
    """Return the table of sites that owners approve: numbers of rows, or ranges."""
    ranges = {site: list(limits) for site, limits in study.row_ranges.items()}
    return {site: ranges.get(site, num) for site, num in study.sites.items()}


def describe_num_rows(study: Any, site: str) -> str:
    """Return the number of rows of a site in the study, or the range."""
    if site not in study.row_ranges:
        return f"{study.sites[site]:,}"
    low, high = study.row_ranges[site]
    return f"{low:,} to {high:,}"


def find_problem(study: Any, site: str, num: object) -> str:
    """Return what is wrong with the number of rows that a site has, or an empty text."""
    low, high = study.row_ranges.get(site, (study.sites[site], study.sites[site]))
    if type(num) is int and low <= num <= high:
        return ""
    has = f"{num} rows" if type(num) is int else f"no number of rows, but {printable(repr(num))}"
    return f"has {has}, the study {study.name!r} says {describe_num_rows(study, site)}."


def with_num_rows(study: Any, num_rows: Mapping[str, int]) -> Any:
    """Return the study with these numbers of rows, which has the same digest and the same model."""
    exact = replace(study, sites={**study.sites, **num_rows})
    vars(exact).update({name: vars(study)[name] for name in SHARED if name in vars(study)})
    return exact


def read_num_rows(study: Any, numbers: object, name: str) -> dict[str, int]:
    """Return the numbers of rows of all sites that the server sent to the site `name`.

    Raise `FrameError` if it did not send a number per site, and `Refused` if a number is not the
    number of this site, or is outside of the range that its owner approved.
    """
    if not isinstance(numbers, list) or len(numbers) != len(study.sites):
        raise FrameError("The beginning of a run must hold the number of rows of each site.")
    num_rows = dict(zip(study.sites, numbers, strict=True))
    for site, num in num_rows.items():
        problem = find_problem(study, site, num)
        if not problem and site == name and num != study.sites[name]:
            problem = f"has {study.sites[name]} rows, the server says {num}."
        if problem:
            raise Refused(f"{site} {problem}")
    return num_rows
