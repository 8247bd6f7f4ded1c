"""Test setup: our own folder is importable, and tiny models do not fight over cores."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tiny passes cost less than waking threads
sys.path.insert(0, str(Path(__file__).parent))
