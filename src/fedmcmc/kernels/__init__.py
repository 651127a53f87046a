"""Families of servers: what a round of communication does."""
