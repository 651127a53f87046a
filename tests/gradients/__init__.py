"""Gradient estimators and the rows that they read."""
