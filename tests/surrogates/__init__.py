"""Surrogates of clients' likelihoods."""
