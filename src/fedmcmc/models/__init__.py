"""Models that multi-site studies use."""
