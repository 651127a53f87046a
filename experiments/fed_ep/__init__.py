"""Federated learning as variational inference (FedEP), Guo et al. (2023)."""
