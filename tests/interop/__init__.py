"""Models of NumPyro and Flax, and tools that read runs."""
