"""Test setup: our own folder is importable, tiny models do not fight over cores, and signals arrive."""

import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tiny passes cost less than waking threads
sys.path.insert(0, str(Path(__file__).parent))

# Background jobs and nohup ignore these, and so would all processes that tests start.
for name, handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) is signal.SIG_IGN:
        signal.signal(getattr(signal, name), handler)
