"""Trees, branches and convolutions."""
