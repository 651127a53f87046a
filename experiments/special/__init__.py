"""Studies that are no grid of runs, and exact distributions beside those that are."""
