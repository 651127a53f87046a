"""What is published: distributions, extras, and the files around the code."""
