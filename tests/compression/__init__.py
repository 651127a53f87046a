"""Compressors, their memories and their codes."""
