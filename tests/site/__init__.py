"""The documentation's site as a browser shows it."""
