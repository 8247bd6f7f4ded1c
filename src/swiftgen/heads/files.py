"""Draft heads on disk: our own files, and the published checkpoints of the paper.

Ours is one safetensors file whose metadata says what the heads are and what they belong to. The published
checkpoints (`TokenSwift/...`) hold the whole model; of them only the head tensors are read, and only from
the files that have them.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from swiftgen.heads.modules import KINDS, DraftHeads, LinearHeads, new_heads
from swiftgen.models.hub import hub_file, is_hub_id
from swiftgen.system.errors import SwiftgenError, first_line
from swiftgen.system.storage import expand_user, replace_file

WEIGHTS_FILE = "heads.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_REFERENCE_NAME = re.compile(
    r"(?:model\.)?medusa_layers\.(\d+)\.(linear|input_layernorm|post_layernorm)\.weight"
)
_MAX_HEADS = 100
_REFERENCE_PARTS = {"linear", "input_layernorm", "post_layernorm"}


@dataclass(frozen=True)
class HeadsInfo:
    """What is known of heads beside their weights.

    Args:
        base_model: Source of the model they were trained for, with its revision if it has one.
        fingerprint: Of its weights; empty if unknown.
        vocab_size: Of that model; 0 if unknown.
        data: What they were trained on.
        num_steps: How long.
    """

    base_model: str = ""
    fingerprint: str = ""
    vocab_size: int = 0
    data: str = ""
    num_steps: int = 0


def save_heads(heads: DraftHeads, folder: Path, info: HeadsInfo) -> Path:
    """Write the heads with what is needed to check them against a model; returns the file.

    Raises:
        SwiftgenError: if the folder cannot be written or the disk is full.
    """
    file = folder / WEIGHTS_FILE
    metadata = {
        "kind": heads.kind,
        "hidden_size": heads.hidden_size,
        "num_heads": heads.num_heads,
        "norm": "rms",
        "eps": heads.eps,
        "reads": "hidden state before the final norm",
        "options": json.dumps(heads.options()),
        **asdict(info),
    }
    text = {key: str(value) for key, value in metadata.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        state = {name: tensor.contiguous() for name, tensor in heads.state_dict().items()}
        replace_file(file, lambda temporary: save_file(state, temporary, text))
    except (OSError, SafetensorError) as error:
        raise SwiftgenError(f"cannot save the heads in {folder}: {error}") from error
    return file


def load_heads(path: str | Path) -> tuple[DraftHeads, HeadsInfo]:
    """Read heads: our own file or its folder, a published checkpoint as a folder, or one on the hub.

    Raises:
        SwiftgenError: if there are none at `path`, or they are damaged.
    """
    place = expand_user(path)
    file = place / WEIGHTS_FILE if os.path.isdir(place) else place
    if os.path.isfile(file):
        return _load_own(file)
    if os.path.isdir(place):
        return read_reference(place)
    if is_hub_id(str(path)) and not os.path.lexists(place):
        return read_reference(str(path))
    raise SwiftgenError(
        f"no draft heads at {path}", f"give a folder with {WEIGHTS_FILE} or set `heads: null`"
    )


def check_heads(heads: DraftHeads, info: HeadsInfo, path: str, hidden_size: int, vocab_size: int) -> None:
    """Raise SwiftgenError unless the heads fit a model of these sizes."""
    belong = f"they belong to {info.base_model or 'an unnamed model'}"
    if heads.hidden_size != hidden_size:
        raise SwiftgenError(
            f"the heads in {path} are for hidden size {heads.hidden_size}, the model has {hidden_size}",
            belong,
        )
    if info.vocab_size not in (0, vocab_size):
        raise SwiftgenError(
            f"the heads in {path} are for {info.vocab_size:,} tokens, the model has {vocab_size:,}", belong
        )
    ids = heads.vocabulary
    if ids is not None and not (_are_ids(ids) and int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        raise _damaged(path, "its draft vocabulary has tokens the model does not know")


def _are_ids(tensor: Tensor) -> bool:
    return tensor.dim() == 1 and len(tensor) > 0 and tensor.dtype in (torch.int32, torch.int64)


def describe_heads(heads: DraftHeads, info: HeadsInfo) -> str:
    """What heads are, for people."""
    num_parameters = sum(parameter.numel() for parameter in heads.parameters())
    drafts = "all tokens" if heads.vocabulary is None else f"{len(heads.vocabulary):,} tokens"
    options = "".join(f", {name} {value}" for name, value in heads.options().items())
    lines = {
        "kind": f"{heads.kind}{options}",
        "heads": f"{heads.num_heads}",
        "parameters": f"{num_parameters:,}",
        "drafts": drafts,
        "hidden size": f"{heads.hidden_size:,}",
        "vocabulary": f"{info.vocab_size:,} tokens" if info.vocab_size else "unknown",
        "model": info.base_model or "unknown",
        "weights": info.fingerprint or "unknown",
        "trained on": info.data or "unknown",
        "steps": f"{info.num_steps:,}" if info.num_steps else "unknown",
    }
    return "\n".join(f"{name:<12} {value}" for name, value in lines.items())


def _load_own(file: Path) -> tuple[DraftHeads, HeadsInfo]:
    try:
        with safe_open(file, framework="pt") as handle:
            metadata = handle.metadata() or {}
            state = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        kind = metadata.get("kind")
        if kind not in KINDS:
            raise SwiftgenError(
                f"{file} is not a swiftgen heads file (kind {kind or 'missing'!r})",
                f"known kinds: {', '.join(KINDS)}",
            )
        num_heads, eps = int(metadata["num_heads"]), float(metadata["eps"])
        if not 1 <= num_heads <= _MAX_HEADS or not 0 <= eps < math.inf:
            raise ValueError(f"num_heads is {num_heads}, eps is {eps}")
        with torch.device("meta"):  # sizes that the file only claims take no memory
            heads = new_heads(
                kind,
                int(metadata["hidden_size"]),
                num_heads,
                eps,
                vocabulary=state.get("vocabulary"),
                **json.loads(metadata["options"]),
            )
        heads.load_state_dict(state, assign=True)  # in their own dtype
        return heads, _info(metadata)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise _damaged(file, first_line(error)) from error


def _info(metadata: Mapping[str, str]) -> HeadsInfo:
    empty = asdict(HeadsInfo())
    return HeadsInfo(**{name: type(empty[name])(metadata[name]) for name in empty if name in metadata})


def read_reference(source: str | Path, revision: str | None = None) -> tuple[LinearHeads, HeadsInfo]:
    """The heads of a published checkpoint: a model folder, or a repository on the hub.

    Raises:
        SwiftgenError: if it has no heads, lacks some of their tensors, or cannot be read.
    """

    def find(name: str) -> Path | None:
        if isinstance(source, Path):
            return source / name if (source / name).is_file() else None
        return hub_file(source, name, revision)

    config_file = find("config.json")
    if config_file is None:
        raise SwiftgenError(f"no draft heads at {source}", f"give a folder with {WEIGHTS_FILE}")
    config = _read_json(config_file)
    tensors: dict[str, Tensor] = {}
    for name in _files_with_heads(find, str(source)):
        file = find(name)
        if file is None:
            raise SwiftgenError(f"{source} lacks {name}, which has its draft heads")
        try:
            with safe_open(file, framework="pt") as handle:
                tensors |= {n: handle.get_tensor(n) for n in _head_names(handle.keys())}
        except (OSError, SafetensorError) as error:
            raise _damaged(file, first_line(error)) from error
    try:
        eps, vocab_size = float(config.get("rms_norm_eps", 1e-6)), int(config.get("vocab_size", 0))
    except (ValueError, TypeError, OverflowError) as error:
        raise _damaged(config_file, first_line(error)) from error
    heads = _assemble(tensors, eps, str(source))
    return heads, HeadsInfo(base_model=str(source), vocab_size=vocab_size, data="published checkpoint")


def _files_with_heads(find: Any, source: str) -> list[str]:
    index = find(_INDEX_FILE)
    if index is None:
        return ["model.safetensors"]
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise _damaged(index, "it has no weight_map")
    names = {str(weight_map[name]) for name in _head_names(weight_map)}
    if not names:
        raise SwiftgenError(f"{source} has no draft heads", "its index names no medusa_layers tensors")
    if any(Path(name).name != name for name in names):
        raise _damaged(index, "it names files outside its folder")
    return sorted(names)


def _head_names(names: Iterable[str]) -> list[str]:
    return [name for name in names if _REFERENCE_NAME.fullmatch(name)]


def _assemble(tensors: Mapping[str, Tensor], eps: float, source: str) -> LinearHeads:
    if not tensors:
        raise SwiftgenError(f"{source} has no draft heads", "it has no medusa_layers tensors")
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _REFERENCE_NAME.fullmatch(name)
        assert match is not None
        state[f"heads.{match[1]}.{match[2]}.weight"] = tensor
    num_heads = 1 + max(int(name.split(".")[1]) for name in state)
    if num_heads > _MAX_HEADS:
        raise _damaged(source, f"it has a head {num_heads - 1:,}")
    wanted = {f"heads.{i}.{part}.weight" for i in range(num_heads) for part in _REFERENCE_PARTS}
    if missing := sorted(wanted - state.keys()):
        raise SwiftgenError(f"{source} is incomplete: it lacks {missing[0]}")
    weight = state["heads.0.linear.weight"]
    if weight.dim() != 2:
        raise _damaged(source, "its linear layers are no matrices")
    with torch.device("meta"):
        heads = LinearHeads(weight.shape[0], num_heads, eps)
    try:
        heads.load_state_dict(state, assign=True)  # in their own dtype
    except RuntimeError as error:
        raise _damaged(source, str(error).splitlines()[-1].strip()) from error
    return heads


def _read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(file, "it is not JSON") from error
    if not isinstance(data, dict):
        raise _damaged(file, "it is not a JSON object")
    return data


def _damaged(file: str | Path, reason: str) -> SwiftgenError:
    return SwiftgenError(f"the heads file {file} is damaged: {reason}", "fetch or train the heads again")
