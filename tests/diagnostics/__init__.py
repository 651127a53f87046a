"""Diagnostics of chains, and runs that stop by them."""
