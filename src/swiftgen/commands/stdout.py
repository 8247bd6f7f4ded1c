"""stdout belongs to the text: exact UTF-8 bytes, at once, and quiet when its reader goes away."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swiftgen.decoding.decode import StepEvent


class ReaderGone(Exception):
    """stdout is a pipe whose other end was closed, as `head` does when it has enough. Not a failure."""


def write_stdout(text: str) -> None:
    """Writes text as UTF-8, without newline translation, and flushes.

    Raises:
        ReaderGone: nobody reads any more.
    """
    try:
        sys.stdout.buffer.write(text.encode("utf-8"))
        sys.stdout.buffer.flush()
    except BrokenPipeError as error:
        raise ReaderGone from error


class StdoutSink:
    """The text of a run to stdout, as it becomes final."""

    def __init__(self) -> None:
        self._ends_line = True

    def append(self, event: StepEvent) -> None:
        if event.text:
            self._ends_line = event.text.endswith("\n")
            write_stdout(event.text)

    def finish(self, stop_reason: str) -> None:
        # A terminal's next prompt starts on a line of its own; a file or pipe gets the text as it is.
        if sys.stdout.isatty() and not self._ends_line:
            write_stdout("\n")
