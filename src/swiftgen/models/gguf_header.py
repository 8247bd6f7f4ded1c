"""The beginning of a GGUF file: what it says of its model, and where each tensor lies.

The gguf library makes arrays of every token of a vocabulary, which takes ten seconds where this takes a third
of one, and a damaged file may lead it anywhere. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swiftgen.system.errors import SwiftgenError, first_line

_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Numbers of types and their letters in `struct`."""
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file.

    Args:
        type_number: Of its type.
        shape: As PyTorch has it, `[out, in]` for a matrix.
        offset: Of its first byte in its part of the file.
        part: Which one, from 0.
    """

    name: str
    type_number: int
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    part: int

    @property
    def type_name(self) -> str:
        """Like Q4_K."""
        from gguf import GGMLQuantizationType

        return GGMLQuantizationType(self.type_number).name


@dataclass(frozen=True)
class GgufHeader:
    """What a file, or a part of one, says of itself."""

    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """Like llama."""
        return str(self.fields.get("general.architecture", ""))


def read_header(path: Path, part: int = 0) -> GgufHeader:
    """The header of a file.

    Args:
        part: Number of this file among those of a model.

    Raises:
        SwiftgenError: it is damaged, ends within a tensor, or has one of a type that nobody knows.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data, path, part).header()
    except (ValueError, struct.error) as error:  # an empty file, or one that ends too early
        raise SwiftgenError(
            f"cannot read {path}: {first_line(error)}", "The file may be damaged: fetch or copy it again."
        ) from error


class _Cursor:
    """Goes through the bytes of a file."""

    def __init__(self, data: mmap.mmap, path: Path, part: int) -> None:
        self._data, self._path, self._part, self._at = data, path, part, 0

    def header(self) -> GgufHeader:
        magic, version, num_tensors, num_fields = self._numbers("4sIQQ")
        if magic != b"GGUF" or version not in _VERSIONS:
            raise ValueError(f"it is not in version 2 or 3 of the format ({magic!r}, {version})")
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._string()
            fields[name] = self._value(*self._numbers("I"))
        found = [self._tensor() for _ in range(num_tensors)]
        alignment = int(fields.get("general.alignment", 32))
        start = math.ceil(self._at / alignment) * alignment
        tensors = {tensor.name: self._placed(tensor, start) for tensor in found}
        if len(tensors) < num_tensors:
            raise ValueError("it has two tensors of one name")
        return GgufHeader(fields, tensors)

    def _tensor(self) -> GgufTensor:
        """With its offset behind the header."""
        name = self._string()
        (num_dimensions,) = self._numbers("I")
        if not 0 < num_dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"{name} has {num_dimensions} dimensions")
        shape = self._numbers(f"{num_dimensions}Q")[::-1]
        type_number, offset = self._numbers("IQ")
        block, size = _sizes(type_number)
        if not block:
            raise SwiftgenError(
                f"{self._path} has weights of a type that is not known here: {name} is of type {type_number}",
                "Update the gguf library (pip install -U gguf), or use a file of another type.",
            )
        if shape[-1] % block:
            raise ValueError(f"{name} has rows of {shape[-1]}, its type has blocks of {block}")
        num_bytes = math.prod(shape) // block * size
        return GgufTensor(name, type_number, shape, offset, num_bytes, self._part)

    def _placed(self, tensor: GgufTensor, start: int) -> GgufTensor:
        """With its offset in the file."""
        placed = replace(tensor, offset=start + tensor.offset)
        if placed.offset + placed.num_bytes > len(self._data):
            raise ValueError(f"it ends within {tensor.name}")
        return placed

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._numbers(_letter(kind))[0]
        kind, count = self._numbers("IQ")
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if count > len(self._data):
            raise ValueError("it ends within an array")
        return list(self._numbers(f"{count}{_letter(kind)}"))

    def _string(self) -> str:
        (length,) = self._numbers("Q")
        begin, self._at = self._at, self._at + length
        if self._at > len(self._data):
            raise ValueError("it ends within a text")
        return self._data[begin : self._at].decode("utf-8", errors="replace")

    def _numbers(self, letters: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{letters}", self._data, self._at)
        self._at += struct.calcsize(f"<{letters}")
        return found


def _letter(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"it has a value of the unknown type {kind}")
    return _SCALARS[kind]


def _sizes(type_number: int) -> tuple[int, int]:
    """Weights and bytes of a block of a type; zeros of one that is not known."""
    from gguf import GGML_QUANT_SIZES

    return next((sizes for kind, sizes in GGML_QUANT_SIZES.items() if kind == type_number), (0, 0))
