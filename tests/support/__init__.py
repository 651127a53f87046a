"""Helpers of tests: runs, kills, models, processes and lanes."""
