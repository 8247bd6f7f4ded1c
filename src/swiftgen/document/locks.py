"""One writer for a run folder: a lock that the system frees when its owner ends, however it ends."""

from __future__ import annotations

import os
from pathlib import Path

import filelock

from swiftgen.system.errors import SwiftgenError
from swiftgen.system.storage import check_regular

LOCK_NAME = ".lock"


def lock_run(folder: Path, path: Path) -> filelock.BaseFileLock:
    """Makes this process the only writer of a run folder, until it releases the lock or ends.

    The file stays; what counts is the lock of the system on it, which a dead process does not hold.

    Args:
        folder: the run folder, or the place where it is prepared.
        path: its text file, for the message.

    Raises:
        SwiftgenError: another process is writing it.
        OSError: the folder is not writable, or its lock is no regular file.
    """
    file = folder / LOCK_NAME
    if os.path.lexists(file):
        check_regular(file, follow_links=False)  # opening another empties it
    lock = filelock.FileLock(file)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        raise SwiftgenError(
            f"{path} is being written by another swiftgen", "wait for it, or end that one first"
        ) from error
    return lock


def check_unlocked(folder: Path, path: Path) -> None:
    """Raises SwiftgenError if another process is writing the run; leaves no trace."""
    if os.path.lexists(folder / LOCK_NAME):
        lock_run(folder, path).release()
