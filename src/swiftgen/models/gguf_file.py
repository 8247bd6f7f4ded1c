"""GGUF files as they are: where each tensor lies, and what transformers makes of the rest.

Making a tokenizer of a file takes seconds. So config and tokenizer are kept in the cache folder, a few
megabytes, with an index of the tensors. Weights are read from the file itself, at every start.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from swiftgen.models.architectures import check_supported
from swiftgen.models.gguf_config import read_config
from swiftgen.models.gguf_header import GgufHeader, GgufTensor, read_header
from swiftgen.models.quiet import quiet_transformers
from swiftgen.models.sources import ResolvedSource
from swiftgen.system.cache_folder import building, cache_folder, cannot_write
from swiftgen.system.errors import SwiftgenError, first_line

# Part of the name of a description: raise it when what is in it changes.
_DESCRIPTION = 2
_INDEX = "tensors.json"
# By the names of llama.cpp. The last five also split digits, which their vocabularies never join.
_SPLIT_LIKE_GPT2 = (
    "default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "roberta-bpe", "exaone4",
    "granite-docling", "smollm", "starcoder", "refact", "command-r", "codeshell",
)  # fmt: skip

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GgufFile:
    """A file and its description.

    Args:
        parts: The file, or all that it is split into.
        folder: config.json, tokenizer and the index of tensors.
    """

    parts: tuple[Path, ...]
    folder: Path
    architecture: str
    tensors: dict[str, GgufTensor]

    @property
    def path(self) -> Path:
        """The file, or its first part."""
        return self.parts[0]

    def read(self, tensor: GgufTensor) -> Tensor:
        """The bytes of a tensor: uint8 `[rows, bytes]`.

        Raises:
            SwiftgenError: the file ends before the tensor does.
        """
        path = self.parts[tensor.part]
        if path.stat().st_size < tensor.offset + tensor.num_bytes:
            raise SwiftgenError(f"{path} ends within {tensor.name}", "Fetch or copy the file again.")
        # Mapped, and gone from memory with the tensor; changes, which nobody makes, would not reach the file.
        data = np.memmap(path, np.uint8, "c", tensor.offset, (tensor.num_bytes,))
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
                    _describe(resolved.parts, work / "description")
                os.rename(work / "description", folder)
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        tensors = [GgufTensor(**entry | {"shape": tuple(entry["shape"])}) for entry in index["tensors"]]
        return GgufFile(resolved.parts, folder, index["architecture"], {t.name: t for t in tensors})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SwiftgenError(f"{folder} is damaged", "Delete it: it is made anew.") from error


def description_folder(resolved: ResolvedSource) -> Path:
    """Where the description of a file is kept; it need not exist yet."""
    return cache_folder() / "gguf" / f"{resolved.fingerprint[:32]}-v{_DESCRIPTION}"


def _describe(parts: tuple[Path, ...], target: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    gguf = parts[0]
    header = _whole_header(parts)
    try:
        with quiet_transformers():
            _check_pre_tokenizer(gguf, header.fields)
            file = GgufFile(parts, target, header.architecture, header.tensors)
            rope = {name: file.numbers(t) for name, t in header.tensors.items() if name.startswith("rope_")}
            config = read_config(gguf, header, rope)
            check_supported(config)
            tokenizer = PreTrainedTokenizerFast.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except SwiftgenError:
        raise
    except Exception as error:  # transformers raises whatever an odd file leads to
        raise SwiftgenError(
            f"cannot read {gguf}: {first_line(error)}",
            "The file may be damaged, or its architecture or tokenizer is not known here.",
        ) from error
    index = {"architecture": header.architecture, "tensors": [asdict(t) for t in header.tensors.values()]}
    try:
        with quiet_transformers():
            config.save_pretrained(target)
            tokenizer.save_pretrained(target)
        (target / _INDEX).write_text(json.dumps(index), encoding="utf-8")
    except Exception as error:  # tokenizers have kinds of their own for a full disk
        raise cannot_write(first_line(error)) from error


def _whole_header(parts: tuple[Path, ...]) -> GgufHeader:
    """The metadata of the first part with the tensors of all.

    Raises:
        SwiftgenError: a part is missing, or belongs elsewhere.
    """
    headers = [read_header(path, number) for number, path in enumerate(parts)]
    tensors: dict[str, GgufTensor] = {}
    for number, (path, header) in enumerate(zip(parts, headers, strict=True)):
        own, total = (int(header.fields.get(f"split.{name}", 0)) for name in ("no", "count"))
        if (own, max(total, 1)) != (number, len(parts)):
            raise SwiftgenError(
                f"{path} is part {own + 1} of {total}, which its name does not say",
                "Name the parts NAME-00001-of-00003.gguf and so on, as they were, in one folder.",
            )
        tensors |= header.tensors
    expected = int(headers[0].fields.get("split.tensors.count", len(tensors)))
    if len(tensors) != expected:
        raise SwiftgenError(f"the parts of {parts[0]} have {len(tensors)} tensors, not {expected}")
    return GgufHeader(headers[0].fields, tensors)


def _check_pre_tokenizer(gguf: Path, fields: Mapping[str, Any]) -> None:
    """Refuse rules that transformers does not know: it would split text as GPT-2 does, without a word."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if fields.get("tokenizer.ggml.model") != "gpt2":
        return
    rules = fields.get("tokenizer.ggml.pre")
    if not rules:
        logger.warning("%s does not say how it splits text: as GPT-2 does, it is assumed", gguf.name)
    elif rules not in (*GGUF_PRE_TOKENIZER_SPLITS, *_SPLIT_LIKE_GPT2):
        raise SwiftgenError(
            f"{gguf} splits text by rules that transformers does not know: {rules}",
            "Update it (pip install -U transformers), or use the model in the safetensors format.",
        )
