"""Run as a script: the command line with slow steps, for tests of signals and kills."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import swiftgen.engine
from swiftgen.cli.app import main


def slowly(steps: Iterator[Any]) -> Iterator[Any]:
    for event in steps:
        time.sleep(0.02)
        yield event


if __name__ == "__main__":
    decode = swiftgen.engine.decode
    swiftgen.engine.decode = lambda *args, **options: slowly(decode(*args, **options))  # type: ignore[attr-defined]
    sys.exit(main())
