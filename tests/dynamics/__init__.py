"""Integrators and preconditioners."""
