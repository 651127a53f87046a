"""Runs: what `sample` is given, and what it refuses."""
