"""The hub: snapshots of model folders, and GGUF files by their type or name.

What is complete on this disk needs no network, and stays the same from run to run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from swiftgen.models.gguf_parts import is_further_part, part_names
from swiftgen.system.cache_folder import not_here
from swiftgen.system.errors import SwiftgenError, first_line

GGUF_PREFIX = "hf:"
# Weights as safetensors, configs, tokenizers; no pickles, no code, no second copy of the weights.
FOLDER_PATTERNS = [
    "*.safetensors",
    "*.json",
    "*.jinja",
    "tokenizer.model",
    "*.tiktoken",
    "merges.txt",
    "vocab.txt",
]
FOLDER_IGNORED = ["original/*", "onnx/*", "openvino/*", "consolidated*.safetensors", "optimizer*"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_GGUF_SOURCE = re.compile(
    r"hf:(?P<repo>[\w.-]+/[\w.-]+)(:(?P<type>[\w.-]+)|/(?P<file>.+\.gguf))", re.IGNORECASE
)
# Beside the models of a repository: encoders of pictures, statistics of activations.
_NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)
_MAX_LISTED = 30


def is_hub_id(source: str) -> bool:
    """Whether a text that names no file here can be the name of a hub repository."""
    return not source.startswith((".", "/", "~")) and _HUB_ID.fullmatch(source) is not None


def snapshot(
    repo_id: str, revision: str | None, patterns: Sequence[str] = FOLDER_PATTERNS, *, local_only: bool
) -> Path:
    """The folder of a commit, named by it, with all files of these patterns.

    Raises:
        SwiftgenError: no such repository, or it cannot be reached; with `local_only`, it is not here.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                repo_id,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=FOLDER_IGNORED,
                local_files_only=local_only,
            )
        )
    except Exception as error:  # the hub library raises a dozen kinds, and those of its HTTP client
        raise (not_here(repo_id) if local_only else _failure(repo_id, revision, error)) from error


def fetch_gguf(source: str, revision: str | None, *, local_only: bool) -> list[Path]:
    """The GGUF file that `hf:OWNER/REPO:TYPE` or `hf:OWNER/REPO/FILE.gguf` names: all its parts in order.

    Raises:
        SwiftgenError: the text has another form; the repository has no such file, or several of the type;
            see `snapshot`.
    """
    found = _GGUF_SOURCE.fullmatch(source)
    if found is None:
        raise SwiftgenError(
            f"model.source {source!r} is not of the form hf:OWNER/REPO:TYPE or hf:OWNER/REPO/FILE.gguf",
            "Example: hf:bartowski/Qwen2.5-7B-Instruct-GGUF:Q4_K_M",
        )
    repo_id, kind, file = found["repo"], found["type"], found["file"]
    try:
        folder = snapshot(repo_id, revision, [], local_only=True)
        here = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        return [folder / name for name in _chosen(here, repo_id, kind, file)]
    except SwiftgenError as error:
        if local_only:
            raise not_here(source) from error
    names = _chosen(_file_names(repo_id, revision), repo_id, kind, file)
    folder = snapshot(repo_id, revision, names, local_only=False)
    return [folder / name for name in names]


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
        raise _failure(repo_id, revision, error) from error


def _file_names(repo_id: str, revision: str | None) -> list[str]:
    from huggingface_hub import list_repo_files

    try:
        return list_repo_files(repo_id, revision=revision)
    except Exception as error:  # as above
        raise _failure(repo_id, revision, error) from error


def _chosen(names: Sequence[str], repo_id: str, kind: str | None, file: str | None) -> list[str]:
    """All parts of the one GGUF file of a type, or of a name."""
    models = [
        name
        for name in sorted(names)
        if name.lower().endswith(".gguf") and not _NO_MODEL.search(name) and not is_further_part(name)
    ]
    if file is not None:
        found, wanted = part_names(file)[:1], file
    else:
        # A type is a word of the name: Q4_0 is not in model-Q4_0_4_4.gguf.
        word = re.compile(rf"(?<![^-._/]){re.escape(str(kind))}(?=[-./])", re.IGNORECASE)
        found, wanted = [name for name in models if word.search(name)], f"of type {kind}"
    listed = ", ".join((found if len(found) > 1 else models)[:_MAX_LISTED]) or "none"
    if len(found) > 1:
        raise SwiftgenError(f"{repo_id} has several GGUF files {wanted}: {listed}", "Name one of them.")
    parts = part_names(found[0]) if found else []
    missing = [name for name in parts if name not in names]
    if missing or not parts:
        raise SwiftgenError(
            f"{repo_id} has no GGUF file {missing[0] if missing else wanted}; it has: {listed}"
        )
    return parts


def _failure(repo_id: str, revision: str | None, error: Exception) -> SwiftgenError:
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
