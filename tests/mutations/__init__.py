"""Seeded bugs that the tests must notice."""
