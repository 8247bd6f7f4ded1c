"""Test setup: our own folder is importable, and torch uses what the machine has."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
