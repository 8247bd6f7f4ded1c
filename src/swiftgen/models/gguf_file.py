"""GGUF files as they are: where each tensor lies, and what transformers makes of the rest.

Reading the metadata of a file takes seconds. So config and tokenizer are kept in the cache folder, a few
megabytes, with an index of the tensors. Weights are read from the file itself, at every start.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from swiftgen.models.architectures import check_supported
from swiftgen.models.gguf_positions import scaled_rope
from swiftgen.models.quiet import quiet_transformers
from swiftgen.models.sources import ResolvedSource
from swiftgen.system.cache_folder import building, cache_folder, cannot_write
from swiftgen.system.errors import SwiftgenError, first_line

# Part of the name of a description: raise it when what is in it changes.
_DESCRIPTION = 1
_INDEX = "tensors.json"
# By the names of llama.cpp. The last five also split digits, which their vocabularies never join.
_SPLIT_LIKE_GPT2 = (
    *(
        "default",
        "gpt-2",
        "phi-2",
        "mpt",
        "olmo",
        "jais",
        "trillion",
        "roberta-bpe",
        "exaone4",
        "granite-docling",
    ),
    *("smollm", "starcoder", "refact", "command-r", "codeshell"),
)


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file.

    Args:
        type_number: Of its type.
        shape: As PyTorch has it, `[out, in]` for a matrix.
        offset: Of its first byte in the file.
    """

    name: str
    type_number: int
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def type_name(self) -> str:
        """Like Q4_K."""
        from gguf import GGMLQuantizationType

        return GGMLQuantizationType(self.type_number).name


@dataclass(frozen=True)
class GgufFile:
    """A file and its description.

    Args:
        folder: config.json, tokenizer and the index of tensors.
    """

    path: Path
    folder: Path
    architecture: str
    tensors: dict[str, GgufTensor]

    def read(self, tensor: GgufTensor) -> Tensor:
        """The bytes of a tensor: uint8 `[rows, bytes]`.

        Raises:
            SwiftgenError: the file ends before the tensor does.
        """
        data = np.fromfile(self.path, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
        if len(data) < tensor.num_bytes:
            raise SwiftgenError(f"{self.path} ends within {tensor.name}", "Fetch or copy the file again.")
        rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        return torch.from_numpy(data).view(rows, -1)

    def numbers(self, tensor: GgufTensor) -> Tensor:
        """The tensor unpacked, float32 in its own shape.

        Raises:
            SwiftgenError: see `read`; or the gguf library does not know how.
        """
        from gguf import GGMLQuantizationType, dequantize

        raw = self.read(tensor).numpy()
        try:
            values = dequantize(raw, GGMLQuantizationType(tensor.type_number))
        except NotImplementedError as error:
            raise SwiftgenError(
                f"{self.path} has weights that the gguf library cannot read, of type {tensor.type_name}",
                "Update it (pip install -U gguf), or use a file of another type.",
            ) from error
        return torch.from_numpy(values.astype(np.float32, copy=False)).view(tensor.shape)

    @cached_property
    def has_experts(self) -> bool:
        """Whether several matrices lie in one tensor."""
        return any(len(tensor.shape) > 2 for tensor in self.tensors.values())


def described(resolved: ResolvedSource) -> GgufFile:
    """A GGUF file with its description, which is made on first use.

    Raises:
        SwiftgenError: the file cannot be read, or holds an unsupported architecture.
    """
    folder = description_folder(resolved)
    if not folder.is_dir():
        with building(folder) as work:
            if not folder.is_dir():  # else another process has just made it
                # The status keeps the real stderr; what the conversion shows goes nowhere.
                status = Console(file=sys.stderr).status(f"reading {resolved.path.name}, once")
                with status, contextlib.redirect_stderr(io.StringIO()):
                    _describe(resolved.path, work / "description")
                os.rename(work / "description", folder)
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        tensors = [GgufTensor(**entry | {"shape": tuple(entry["shape"])}) for entry in index["tensors"]]
        return GgufFile(resolved.path, folder, index["architecture"], {t.name: t for t in tensors})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SwiftgenError(f"{folder} is damaged", "Delete it: it is made anew.") from error


def description_folder(resolved: ResolvedSource) -> Path:
    """Where the description of a file is kept; it need not exist yet."""
    return cache_folder() / "gguf" / f"{resolved.fingerprint[:32]}-v{_DESCRIPTION}"


def _describe(gguf: Path, target: Path) -> None:
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoTokenizer

    try:
        with quiet_transformers():
            reader = GGUFReader(gguf)
            _check_complete(gguf, reader)
            _check_pre_tokenizer(gguf, reader)
            config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
            config.rope_parameters = scaled_rope(gguf, reader, config)
            check_supported(config)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        index = _index(reader)
    except SwiftgenError:
        raise
    except Exception as error:  # gguf and transformers raise whatever a damaged file leads to
        raise SwiftgenError(
            f"cannot read {gguf}: {first_line(error)}",
            "The file may be damaged, or its architecture or the type of its weights is not known here.",
        ) from error
    try:
        with quiet_transformers():
            config.save_pretrained(target)
            tokenizer.save_pretrained(target)
        (target / _INDEX).write_text(json.dumps(index), encoding="utf-8")
    except Exception as error:  # tokenizers have kinds of their own for a full disk
        raise cannot_write(first_line(error)) from error


def _check_complete(gguf: Path, reader: Any) -> None:
    """Refuse a part of a model."""
    number, total = (_field(reader, f"split.{name}") or 0 for name in ("no", "count"))
    if total > 1:
        raise SwiftgenError(
            f"{gguf} is part {number + 1} of {total}, and all are needed in one file",
            "Join them: `llama-gguf-split --merge FIRST_PART WHOLE.gguf`, with the part 00001 as the first.",
        )


def _check_pre_tokenizer(gguf: Path, reader: Any) -> None:
    """Refuse rules that transformers does not know: it would split text as GPT-2 does, without a word."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    rules = _field(reader, "tokenizer.ggml.pre")
    is_bpe = _field(reader, "tokenizer.ggml.model") == "gpt2"
    if is_bpe and rules and rules not in (*GGUF_PRE_TOKENIZER_SPLITS, *_SPLIT_LIKE_GPT2):
        raise SwiftgenError(
            f"{gguf} splits text by rules that transformers does not know: {rules}",
            "Update it (pip install -U transformers), or use the model in the safetensors format.",
        )


def _field(reader: Any, name: str) -> Any:
    field = reader.fields.get(name)
    return None if field is None else field.contents()


def _index(reader: Any) -> dict[str, object]:
    tensors = [
        GgufTensor(
            tensor.name,
            int(tensor.tensor_type),
            tuple(int(size) for size in reversed(tensor.shape)),
            int(tensor.data_offset),
            int(tensor.n_bytes),
        )
        for tensor in reader.tensors
    ]
    architecture = str(_field(reader, "general.architecture"))
    return {"architecture": architecture, "tensors": [asdict(tensor) for tensor in tensors]}
