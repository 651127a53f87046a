"""Predicted laws and step sizes."""
