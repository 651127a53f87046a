"""Tests of all kernels with compressors and participation rules."""
