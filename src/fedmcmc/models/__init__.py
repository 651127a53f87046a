"""Regression and survival models by formula."""
