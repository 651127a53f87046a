"""Messages as strings of bits."""
