"""Where the prompt comes from: an option, a file, stdin, or the default."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from swiftgen.system.errors import SwiftgenError
from swiftgen.system.storage import read_regular

DEFAULT_PROMPT = "Write a long story about a lighthouse keeper who finds a letter that the sea has brought."

_GIVE_ONE = "give a text with --prompt or --prompt-file, or - for stdin"


def read_prompt(text: str | None, file: Path | None, from_stdin: bool) -> str:
    """The prompt of a run; of a file or stdin without one final newline, as editors and echo add it.

    Args:
        text: given as an option.
        file: a file to read; ``-`` is stdin.
        from_stdin: stdin was asked for. It is also read if nothing is given and it is no terminal.

    Raises:
        SwiftgenError: two sources at once; an unreadable, empty or undecodable prompt.
    """
    if file == Path("-"):
        file, from_stdin = None, True
    given = [name for name, is_given in _sources(text, file, from_stdin) if is_given]
    if len(given) > 1:
        raise SwiftgenError(f"the prompt is given twice: {' and '.join(given)}", "give it once")
    if text is not None:
        return _checked(_valid_text(text), "--prompt")
    if file is not None:
        return _checked(_decoded(_read_file(file), str(file)), str(file))
    if from_stdin or _stdin_is_piped():
        return _checked(_decoded(_read_stdin(), "stdin"), "stdin")
    return DEFAULT_PROMPT


def _sources(text: str | None, file: Path | None, from_stdin: bool) -> list[tuple[str, bool]]:
    return [("--prompt", text is not None), ("--prompt-file", file is not None), ("- (stdin)", from_stdin)]


def _checked(prompt: str, name: str) -> str:
    if not prompt.strip():
        raise SwiftgenError(f"the prompt is empty ({name})", _GIVE_ONE)
    return prompt


def _valid_text(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # bytes of the command line that are no UTF-8 arrive as surrogates
        raise SwiftgenError(
            f"the prompt is not valid Unicode (character {error.start})", "pass it in a UTF-8 file"
        ) from error
    return text


def _read_file(file: Path) -> bytes:
    try:
        return file.read_bytes() if _is_open_pipe(file) else read_regular(file)
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the name
        reason = getattr(error, "strerror", None) or error
        raise SwiftgenError(f"cannot read the prompt file {file}: {reason}", _GIVE_ONE) from error


def _is_open_pipe(file: Path) -> bool:
    """Whether it is a pipe of this process, as `<(command)` gives; one with a name might never be written."""
    is_descriptor = os.path.abspath(file).startswith(("/dev/fd/", "/dev/stdin", "/proc/self/fd/"))
    return is_descriptor and stat.S_ISFIFO(os.stat(file).st_mode)


def _read_stdin() -> bytes:
    if sys.stdin is None or sys.stdin.closed:
        raise SwiftgenError("there is no stdin to read the prompt from", _GIVE_ONE)
    if sys.stderr.isatty():
        print("reading the prompt from stdin", file=sys.stderr)
    return sys.stdin.buffer.read()


def _decoded(data: bytes, name: str) -> str:
    try:
        text = data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise SwiftgenError(
            f"{name} is not valid UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}",
            "convert the prompt to UTF-8",
        ) from error
    return text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")


def _stdin_is_piped() -> bool:
    """Whether stdin is a pipe or a file. A terminal, /dev/null or nothing is not: no prompt comes from it."""
    if sys.stdin is None or sys.stdin.closed:
        return False
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)
