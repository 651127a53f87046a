"""The study of the deployed demo, and the process of its server."""
