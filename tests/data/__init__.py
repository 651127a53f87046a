"""Federated data and its partitions."""
