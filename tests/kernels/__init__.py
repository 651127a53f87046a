"""Kernels: their identities, limits and errors."""
