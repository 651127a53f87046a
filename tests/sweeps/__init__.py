"""Sweeps over settings."""
