"""Exact laws in float64 NumPy, federations to hold samples against them, and their own tests."""
