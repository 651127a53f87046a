"""Contracts of all public constructors: a table of them, and tests that run through it."""
