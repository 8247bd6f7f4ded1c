"""A document on disk: the text file and, beside it, the run folder.

    book.txt             the text, UTF-8, appended as it becomes final
    book.swiftgen/
        run.yaml         what was asked for and with what it was computed (manifest.py)
        tokens.bin       append-only little-endian uint32 token ids, the prompt first
        steps.jsonl      cumulative metrics, about one record a second
        .lock            held by the process that writes the run (locks.py)

The token log is the truth and the text is derived from it, so of every step the tokens are written
first. A killed process loses nothing; a power cut loses at most what came after the last sync.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from filelock import BaseFileLock

from swiftgen.document.locks import LOCK_NAME, check_unlocked, lock_run
from swiftgen.document.manifest import MANIFEST_NAME, Manifest, now_utc, read_manifest, write_manifest
from swiftgen.figures.metrics import RunMetrics
from swiftgen.system.errors import SwiftgenError
from swiftgen.system.ranks import launcher
from swiftgen.system.storage import AppendFile, disk_errors, read_regular, sync_folder, write_synced

if TYPE_CHECKING:
    from swiftgen.decoding.decode import StepEvent

RUN_SUFFIX = ".swiftgen"
TOKENS_NAME = "tokens.bin"
STEPS_NAME = "steps.jsonl"
SYNC_INTERVAL_S = 1.0

_KNOWN_NAMES = {MANIFEST_NAME, f".{MANIFEST_NAME}.new", TOKENS_NAME, STEPS_NAME, LOCK_NAME}
TOKEN_BYTES = 4


def run_folder(path: Path) -> Path:
    """The run folder of a text file: book.txt -> book.swiftgen."""
    return path.with_suffix(RUN_SUFFIX)


def how_to_resume(path: Path) -> str:
    """The command that goes on with a stopped run, for a sentence."""
    return f"`{launcher()}swiftgen resume {shlex.quote(str(path))}`"


def read_tokens(folder: Path) -> list[int]:
    """All token ids of a run folder's log, prompt first; a partial last record is left out.

    Raises:
        SwiftgenError: the log cannot be read.
    """
    path = folder / TOKENS_NAME
    with disk_errors(path, "read"):
        data = read_regular(path, follow_links=False)
    count = len(data) // TOKEN_BYTES
    return list(struct.unpack_from(f"<{count}I", data))


def check_output(path: Path, force: bool) -> None:
    """Checks, without touching anything, that a document can be created at `path`.

    Raises:
        SwiftgenError: the place is taken, not writable, or something that is never replaced.
    """
    with disk_errors(path, "write"):
        if path.is_dir():
            raise SwiftgenError(f"{path} is a folder", f"name a file in it, for example {path / 'book.txt'}")
        if path.suffix == RUN_SUFFIX:
            raise SwiftgenError(
                f"{path}: names ending in {RUN_SUFFIX} are kept for run folders", "name a text file"
            )
        if any("\ud800" <= character <= "\udfff" for character in path.name):
            raise SwiftgenError(f"{path}: the name is not UTF-8", "choose another name")
        if not path.parent.is_dir():
            raise SwiftgenError(f"the folder {path.parent} does not exist", "create it first")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise SwiftgenError(f"the folder {path.parent} is not writable", "choose another place with -o")
        _check_replaceable(path, force)


class Document:
    """A run that is being written; use it as a context manager.

    Args:
        path: the text file; it and its run folder exist (see `create`).
        manifest: the content of its run.yaml.
        lock: of the run folder, if this process has it already. It is released when the run ends.
        metrics: if given, its figures go to steps.jsonl; observe each event before appending it.
        clock: seconds from any origin.

    Raises:
        SwiftgenError: from every method, if the disk fails or is full. What was written stays.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        *,
        lock: BaseFileLock | None = None,
        metrics: RunMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self.folder = run_folder(path)
        self.manifest = manifest
        self._metrics = metrics
        self._clock = clock
        self._next_sync_s = clock() + SYNC_INTERVAL_S
        self._finished = False
        with self._disk_errors():
            self._lock = lock or lock_run(self.folder, path)
            self._log = AppendFile(self.folder / TOKENS_NAME, lambda data: len(data) & -TOKEN_BYTES)
            self._text = AppendFile(path)
            self._steps = AppendFile(self.folder / STEPS_NAME, lambda data: data.rfind(b"\n") + 1)
            self._sync()  # the first record: from here on, what the log holds now is under a checksum

    @classmethod
    def create(
        cls,
        path: Path,
        manifest: Manifest,
        prompt_ids: Sequence[int],
        *,
        force: bool = False,
        metrics: RunMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> Document:
        """Starts a new document whose log holds the prompt.

        With `force`, an older document at `path` is replaced; it goes only once the new one is on
        the disk.
        """
        check_output(path, force)
        staging = path.parent / f".{run_folder(path).name}.{os.getpid()}"
        with disk_errors(path, "write"):
            try:
                staging.mkdir()
                lock = lock_run(staging, path)
                write_manifest(staging, manifest)
                write_synced(staging / TOKENS_NAME, packed(prompt_ids))
                write_synced(staging / STEPS_NAME, b"")
                sync_folder(staging)  # else a power cut may take the names of files that are on the disk
                if force:
                    _remove_document(path)
                staging.rename(run_folder(path))
                open(path, "xb").close()
            except BaseException:
                shutil.rmtree(staging, ignore_errors=True)
                raise
            sync_folder(path.parent)
        return cls(path, manifest, lock=lock, metrics=metrics, clock=clock)

    @property
    def num_tokens(self) -> int:
        """Generated tokens in the log."""
        return self._log.size // TOKEN_BYTES - self.manifest.num_prompt_tokens

    def append(self, event: StepEvent) -> None:
        """Writes the tokens of one step, then its text; about once a second all is synced."""
        with self._disk_errors():
            self._log.add(packed(event.token_ids))
            self._text.add(event.text.encode("utf-8"))
            self._log.flush()
            self._text.flush()
            if self._clock() >= self._next_sync_s:
                self._sync()
                self._next_sync_s = self._clock() + SYNC_INTERVAL_S

    def finish(self, stop_reason: str) -> None:
        """Syncs everything and closes the run as complete ("length", "eos") or as stopped."""
        if self._finished:
            return
        self._finished = True
        try:
            with self._disk_errors():
                self._sync()
                self.manifest = self.manifest.finished(stop_reason)
                write_manifest(self.folder, self.manifest)
        finally:
            for file in (self._log, self._text, self._steps):
                file.close()
            self._lock.release()

    def __enter__(self) -> Document:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish("stopped")
            return
        # The first failure is the one to report; a second one while closing is its consequence.
        with suppress(SwiftgenError):
            self.finish("interrupted" if isinstance(error, KeyboardInterrupt) else "error")

    def _disk_errors(self) -> AbstractContextManager[None]:
        return disk_errors(self.path, "write", f"then go on with {how_to_resume(self.path)}")

    def _sync(self) -> None:
        self._log.sync()
        self._text.sync()
        for file in (self._log, self._text, self._steps):
            if not file.is_in_place:
                raise SwiftgenError(
                    f"{file.path} was moved, removed or replaced while it was written",
                    f"put it back, then go on with {how_to_resume(self.path)}",
                    exit_code=1,
                )
        record: dict[str, object] = {
            "time": now_utc().isoformat(),
            # With these a reader can tell a log that was damaged from one that was cut.
            "log_tokens": self._log.size // TOKEN_BYTES,
            "log_crc32": self._log.crc32,
        }
        if self._metrics is not None:
            record |= self._metrics.snapshot().to_json()
        self._steps.add(json.dumps(record).encode("utf-8") + b"\n")
        self._steps.flush()


def packed(token_ids: Sequence[int]) -> bytes:
    """Token ids as the log holds them."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def _check_replaceable(path: Path, force: bool) -> None:
    """Refuses to replace anything but a regular file and a run folder of its own, and that only by force."""
    folder = run_folder(path)
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
        raise SwiftgenError(f"{path} is not a regular file", "choose another name, or -o - for stdout")
    if os.path.lexists(folder):
        if folder.is_symlink() or not folder.is_dir():
            raise SwiftgenError(f"{folder} is in the way: it is not a run folder", "choose another name")
        if foreign := sorted(set(os.listdir(folder)) - _KNOWN_NAMES):
            raise SwiftgenError(
                f"{folder} holds files that are not swiftgen's ({foreign[0]})", "choose another name"
            )
        owner = _owner(folder)
        if owner not in (None, path.name):
            raise SwiftgenError(f"{folder} is the run folder of {owner}", "choose another name")
    taken = next((place for place in (path, folder) if os.path.lexists(place)), None)
    if taken is not None and not force:
        go_on = f"go on with it by {how_to_resume(path)}, " if folder.is_dir() else ""
        raise SwiftgenError(
            f"{taken} exists already", f"{go_on}replace it with --force, or choose another name"
        )
    check_unlocked(folder, path)


def _owner(folder: Path) -> str | None:
    """The text file that a run folder belongs to; None if its manifest does not say."""
    with suppress(SwiftgenError):
        return read_manifest(folder).text_file
    return None


def _remove_document(path: Path) -> None:
    """Removes a text file and its run folder, which `_check_replaceable` has approved."""
    folder = run_folder(path)
    if folder.is_dir():
        lock = lock_run(folder, path)
        for name in _KNOWN_NAMES:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
        lock.release()
    path.unlink(missing_ok=True)
