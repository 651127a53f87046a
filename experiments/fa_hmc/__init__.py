"""Bayesian federated learning with Hamiltonian Monte Carlo (FA-HMC), Liang et al. (2024)."""
