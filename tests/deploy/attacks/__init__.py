"""Attacks on a study: each test names the attacker and what the attack would yield."""
