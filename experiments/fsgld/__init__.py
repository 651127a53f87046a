"""Federated stochastic gradient Langevin dynamics, El Mekkaoui et al. (2021)."""
