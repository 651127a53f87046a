"""How many messages are enough to compute the rows from which they were computed."""

import math


def messages_to_recover(num_rows: int, numbers_per_row: int, numbers_per_message: int) -> int:
    """Return the number of messages from which on all rows can be computed.

    Each number in a message is an equation in the numbers of the rows. With as many independent
    equations as unknowns, only separate solutions are left. The count is not exact: binary
    columns and columns of ones need fewer messages, and messages that are not independent, as in a
    linear regression, never determine all rows.

    Parameters
    ----------
    num_rows
        Number of rows over which each message is a sum: all rows of a site, under masks of all
        sites, or the rows of a minibatch that is known.
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
