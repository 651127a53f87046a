"""Rounds, and the simulator of them."""
