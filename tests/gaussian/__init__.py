"""Gaussians in natural parameters."""
