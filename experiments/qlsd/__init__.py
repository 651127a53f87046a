"""Quantised Langevin stochastic dynamics, Vono et al. (2022)."""
