"""Accumulators of a run on the device."""
