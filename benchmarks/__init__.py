"""Benchmarks, which compare medians within one run. `make bench` runs all of them."""
