"""The tests, in the rooms of what they test; see CONTRIBUTING.md for the lanes they run in."""
