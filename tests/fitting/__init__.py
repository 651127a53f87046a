"""Tests of one call: modes, chains, verdicts, reports."""
