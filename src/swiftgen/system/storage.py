"""Files that survive failures: records appended whole, files replaced whole, errors in one line."""

from __future__ import annotations

import errno
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from swiftgen.system.errors import SwiftgenError


class AppendFile:
    """An existing file that grows by whole records: a flush that fails leaves it as it was.

    What could not be written waits for the next flush. The state is one value, replaced at once, and
    writes go to a fixed place; so an interrupt (Ctrl-C) between any two instructions neither loses
    nor repeats a record.

    Args:
        whole_bytes: how much of a content is whole records; what is left of another is cut off.

    Raises:
        OSError: there is no regular file, or it cannot be written.
    """

    def __init__(self, path: Path, whole_bytes: Callable[[bytes], int] = len) -> None:
        self.path = path
        check_regular(path, follow_links=False)
        self._file = FileIO(path, "r+")
        data = self._file.readall()
        if whole_bytes(data) < len(data):
            data = data[: whole_bytes(data)]
            self._file.truncate(len(data))
        self._state = (len(data), zlib.crc32(data), b"")  # (bytes written, their checksum, bytes waiting)

    @property
    def size(self) -> int:
        """Bytes written."""
        return self._state[0]

    @property
    def crc32(self) -> int:
        """Checksum of the bytes written."""
        return self._state[1]

    @property
    def is_in_place(self) -> bool:
        """Whether its name still leads to this file; one that was removed can be written, but not found."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        except FileNotFoundError:
            return False

    def add(self, data: bytes) -> None:
        """Queues a record for the next flush."""
        size, crc, waiting = self._state
        self._state = (size, crc, waiting + data)

    def flush(self) -> None:
        """Hands what waits to the system: from here on a killed process cannot lose it."""
        size, crc, waiting = self._state
        if not waiting:
            return
        self._file.seek(size)
        try:
            written = 0
            while written < len(waiting):
                written += self._file.write(waiting[written:])
        except OSError:
            with suppress(OSError):
                self._file.truncate(size)
            raise
        self._state = (size + len(waiting), zlib.crc32(waiting, crc), b"")

    def sync(self) -> None:
        """Flushes and returns when all is on the disk."""
        self.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file; what still waits is dropped."""
        self._file.close()


def expand_user(path: str | Path) -> Path:
    """A path with its `~` or `~user` replaced, as it is where there is no such user and can be none."""
    try:
        return Path(os.path.expanduser(path))
    except ValueError:  # a NUL character
        return Path(path)


def read_regular(path: Path, *, follow_links: bool = True) -> bytes:
    """All of a regular file. A pipe would be waited for, a device may never end.

    Args:
        follow_links: False refuses symbolic links: what is written later might be somebody else's file.

    Raises:
        OSError: it is something else, or cannot be read.
    """
    check_regular(path, follow_links=follow_links)
    return path.read_bytes()


def check_regular(path: Path, *, follow_links: bool = True) -> None:
    """Raises OSError unless there is a regular file; see `read_regular`."""
    mode = os.stat(path, follow_symlinks=follow_links).st_mode
    if not stat.S_ISREG(mode):
        what = "a symbolic link" if stat.S_ISLNK(mode) else "not a regular file"
        raise OSError(errno.EINVAL, f"it is {what}", str(path))


def write_synced(path: Path, data: bytes) -> None:
    """Creates or replaces a file and waits until it is on the disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Makes or replaces a file by what `write` leaves at the path it is given; all of it or nothing."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        write(temporary)
        temporary.chmod(mode)  # some libraries make files that only their owner can read
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable, where the system can (POSIX)."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def disk_errors(path: Path, verb: str, go_on: str = "") -> Iterator[None]:
    """Turns a failure of the disk into one line for people.

    Args:
        path: what is read or written.
        verb: "read" or "write".
        go_on: how to go on with a run that is stopped by it; empty if none is.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SwiftgenError(
                f"the disk is full: {path} ends early",
                f"what was written is kept; make room, {go_on}" if go_on else "make room first",
                exit_code=1,
            ) from error
        raise SwiftgenError(
            f"cannot {verb} {error.filename or path}: {error.strerror or error}",
            f"what was written is kept; set that right, {go_on}" if go_on else "",
            exit_code=1 if go_on else 2,
        ) from error
    except ValueError as error:  # a NUL character in the name
        raise SwiftgenError(f"cannot {verb} {str(path)!r}: {error}") from error
