"""Checkpoints, and runs that go on from them."""
