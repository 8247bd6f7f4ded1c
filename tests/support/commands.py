"""The command line in tests: in this process and in others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swiftgen.document.document import TOKENS_NAME, run_folder

PROMPT = "The hen saw the heron."
NUM_TOKENS = 150


@dataclass
class Outcome:
    code: int
    out: str
    err: str


Call = Callable[..., Outcome]


def write_command(preset: Path, path: Path, num_tokens: int = NUM_TOKENS, *options: str) -> list[str]:
    fixed = ["--preset", str(preset), "-n", str(num_tokens), "-o", str(path), "--seed", "5", "-p", PROMPT]
    return ["write", *fixed, *options]


def as_process(
    module: str, *args: str | Path, cwd: Path, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """The command line as another process, of `swiftgen` or of a module of ours that stands for it."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, args)],
        cwd=cwd,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )


def environment() -> dict[str, str]:
    """In which a process of Python imports what this one can."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def wait_for_tokens(process: subprocess.Popen[bytes], path: Path, num_tokens: int) -> None:
    deadline_s = time.monotonic() + 60
    log = run_folder(path) / TOKENS_NAME
    while not log.exists() or log.stat().st_size < 4 * num_tokens:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
