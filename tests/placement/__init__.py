"""Layouts of clients, chains and states, which draw the numbers of one device."""
