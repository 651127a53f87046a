"""Published algorithms, each a composition of blocks."""
