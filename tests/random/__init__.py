"""Random keys, and what is drawn from them."""
