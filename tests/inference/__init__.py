"""Inference at a client."""
