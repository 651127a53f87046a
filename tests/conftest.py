"""Shared by all tests: the law oracle's folder on the path and a Gaussian federation to sample."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # `laws` is imported by name
