"""Real sites: sessions, masks and what a site refuses."""
