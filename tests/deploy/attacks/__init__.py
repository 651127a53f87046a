"""Attacks on a study: each test says who attacks and what they would get, and that they do not."""
