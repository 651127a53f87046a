"""Tests of exactness: questions, importance weights, corrections."""
