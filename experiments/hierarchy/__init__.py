"""Random effects: latents that never leave their client."""
