"""The one exception that users see as a single line, and how others become part of one."""

from __future__ import annotations

from swiftgen.system.redaction import redacted

EXIT_INTERRUPTED = 130  # what a shell reports for a program that SIGINT ended


class SwiftgenError(Exception):
    """A failure the user can act on; the CLI prints it as one line plus a hint. Secrets are left out.

    Args:
        message: what is wrong, in one line.
        hint: what to do about it; empty if there is nothing to add.
        exit_code: the status with which the command ends.
    """

    def __init__(self, message: str, hint: str = "", exit_code: int = 2) -> None:
        self.message = redacted(message)
        self.hint = redacted(hint)
        super().__init__(self.message)
        self.exit_code = exit_code


def first_line(error: Exception) -> str:
    """The first line of an exception's text, or its type if it has none."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def exit_code_of(interrupt: KeyboardInterrupt) -> int:
    """With what a command ends: that of the signal, where the interrupt says which it was."""
    return int(getattr(interrupt, "exit_code", EXIT_INTERRUPTED))
