"""Benchmarks: every figure is a ratio of medians in one run. `make bench` runs them all."""
