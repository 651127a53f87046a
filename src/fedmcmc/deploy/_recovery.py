"""Number of messages that are enough to compute rows."""

import math


def messages_to_recover(num_rows: int, numbers_per_row: int, numbers_per_message: int) -> int:
    """Return the number of messages that are enough to compute all rows.

    Each number in a message is an equation in the numbers of the rows. With as many independent
    equations as unknowns, only isolated solutions remain. The count is approximate: binary columns
    and columns of ones need fewer messages, and messages that are not independent, such as those in
    a linear regression, never determine all rows.

    Parameters
    ----------
    num_rows
        Number of rows in the sum that is a message: all rows of a site, all rows of all sites under
        masks, or the rows of a minibatch that can be repeated.
    numbers_per_row, numbers_per_message
        Numbers in a row, and in a message.

    Returns
    -------
    int
        At least 1.

    Examples
    --------
    >>> messages_to_recover(413, numbers_per_row=6, numbers_per_message=5)
    496
    """
    return math.ceil(num_rows * numbers_per_row / numbers_per_message)
