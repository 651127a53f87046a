"""Kernels against their exact law, round by round."""
