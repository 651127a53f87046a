"""Kernels made of kernels: faults and sequences."""
