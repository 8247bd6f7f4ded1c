"""The cache folder for downloaded and converted weights: atomic, locked, hashed once.

Nothing appears in it half-written: work happens in a temporary folder on the same disk and is moved into
place with one rename.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock
import platformdirs

from swiftgen.system.errors import SwiftgenError
from swiftgen.system.storage import expand_user

CACHE_VARIABLE = "SWIFTGEN_CACHE"
_STALE_WORK_S = 7 * 24 * 3600.0

logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """$SWIFTGEN_CACHE, else the user's cache folder for swiftgen; it need not exist yet."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return expand_user(chosen).absolute() if chosen else Path(platformdirs.user_cache_dir("swiftgen"))


@contextlib.contextmanager
def building(target: Path) -> Iterator[Path]:
    """Hold the lock of `target` and give a work folder on the same disk.

    Whoever waited for the lock must look again whether `target` is there already.

    Raises:
        SwiftgenError: if the cache folder cannot be written or the disk is full.
    """
    try:
        root = cache_folder()
        (root / "locks").mkdir(parents=True, exist_ok=True)
        (root / "work").mkdir(exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(root / "work")
        name = hashlib.sha256(str(target).encode()).hexdigest()[:32]
        with (
            _locked(root / "locks" / f"{name}.lock", target.name),
            tempfile.TemporaryDirectory(dir=root / "work", ignore_cleanup_errors=True) as work,
        ):
            yield Path(work)
    except OSError as error:
        raise cannot_write(error.strerror or str(error)) from error


def cannot_write(reason: str) -> SwiftgenError:
    """What to raise when the cache folder takes no more."""
    return SwiftgenError(
        f"cannot write the model cache {cache_folder()}: {reason}",
        f"Free some space, or set {CACHE_VARIABLE} to another folder.",
    )


def writable_by_others(path: Path) -> Path | None:
    """What others than its user may write of a path, so that they may change or replace the file there.

    Links are followed. In a folder with the sticky bit (as /tmp has) others cannot replace a file.

    Returns:
        The file or a folder above it; None if there is nothing of the kind, or the system has no such rights.
    """
    if not hasattr(os, "getuid"):
        return None
    real = Path(os.path.realpath(path))
    for place in (real, *real.parents):
        try:
            status = place.stat()
        except OSError:  # it is not there yet
            continue
        shared = stat.S_IWOTH | (0 if _is_own_group(status.st_gid) else stat.S_IWGRP)
        is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        if status.st_uid not in (0, os.getuid()) or (status.st_mode & shared and not is_sticky):
            return place
    return None


def _is_own_group(gid: int) -> bool:
    """Whether a group is that of this user alone, as many systems make one for each."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def need_space(num_bytes: int, what: str) -> None:
    """Raise SwiftgenError if the disk of the cache folder has less than `num_bytes` free."""
    folder = cache_folder()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise SwiftgenError(
            f"{what} takes {num_bytes / 1e9:.1f} GB, {cache_folder()} has {free / 1e9:.1f} GB free",
            f"Free some space, or set {CACHE_VARIABLE} to a folder on another disk.",
        )


def not_here(source: str) -> SwiftgenError:
    """What to raise for a model that would have to be fetched where nothing may be."""
    return SwiftgenError(
        f"{source} is not on this machine yet", "The first `swiftgen write` fetches it over the network."
    )


def file_sha256(path: Path, memo: Path) -> str:
    """SHA-256 of a file in hex, remembered in `memo` with the file's size and time of change.

    Reading 100 MB takes longer than loading it; the memo makes every later start free.
    """
    noted = _read_memo(memo)
    if noted is None or (noted.size_bytes, noted.mtime_ns) != _size_and_mtime(path):
        return remember_sha256(path, memo, hash_file(path))
    return noted.sha256


def is_intact(path: Path, memo: Path) -> bool:
    """Whether `path` is the file that `memo` was written for (its time may differ, as after a copy)."""
    noted = _read_memo(memo)
    if noted is None or not path.is_file() or path.stat().st_size != noted.size_bytes:
        return False
    if _size_and_mtime(path)[1] == noted.mtime_ns:
        return True
    if hash_file(path) != noted.sha256:
        return False  # and the memo stays, so that the next to ask learns the same
    remember_sha256(path, memo, noted.sha256)
    return True


def remember_sha256(path: Path, memo: Path, sha256: str) -> str:
    """Write the memo of `file_sha256` and return the hash."""
    size_bytes, mtime_ns = _size_and_mtime(path)
    note = {"sha256": sha256, "size_bytes": size_bytes, "mtime_ns": mtime_ns}
    with contextlib.suppress(OSError):  # a cache that is shared read-only still works, it only re-hashes
        memo.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=memo.parent)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(note, file)
        os.replace(name, memo)
    return sha256


def hash_file(path: Path) -> str:
    """SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class _Memo:
    sha256: str
    size_bytes: int
    mtime_ns: int


def _read_memo(memo: Path) -> _Memo | None:
    try:
        noted = json.loads(memo.read_text(encoding="utf-8"))
        return _Memo(str(noted["sha256"]), int(noted["size_bytes"]), int(noted["mtime_ns"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # missing or broken: it costs only time


def _size_and_mtime(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


@contextlib.contextmanager
def _locked(path: Path, what: str) -> Iterator[None]:
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        logger.warning("another swiftgen is fetching or converting %s, waiting for it", what)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _sweep(work: Path) -> None:
    """Remove what killed processes left behind."""
    for folder in work.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > _STALE_WORK_S:
                shutil.rmtree(folder, ignore_errors=True)
