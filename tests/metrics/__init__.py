"""Scores of draws and predictions."""
