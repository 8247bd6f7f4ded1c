"""Hidden states of training texts: computed when asked for, and kept on disk where they fit."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from swiftgen.system.errors import SwiftgenError
from swiftgen.training.base import FrozenBase
from swiftgen.training.texts import Texts


class StateStore:
    """States of all but the last token of every sequence, bfloat16 `[S - 1, hidden]` each.

    Args:
        file: Where to keep them, so that a second epoch, another kind of heads or a resumed training does
            not run the model again; None keeps nothing.
    """

    def __init__(self, base: FrozenBase, texts: Texts, file: Path | None) -> None:
        self._base, self._texts = base, texts
        shape = (len(texts), texts.tokens.shape[1] - 1, base.config.hidden_size)
        self._kept: Tensor | None = None
        self._is_kept = torch.zeros(len(texts), dtype=torch.bool)
        if file is not None:
            self._kept = mapped(file, shape, torch.bfloat16)
            self._is_kept = mapped(file.with_suffix(".done"), (len(texts),), torch.bool)

    @staticmethod
    def num_bytes(num_texts: int, sequence_length: int, hidden_size: int) -> int:
        """What keeping all states takes."""
        return num_texts * (sequence_length - 1) * hidden_size * torch.bfloat16.itemsize

    def put(self, first: int, states: Tensor) -> None:
        """Keep states that are known already, of the sequences from `first` on."""
        if self._kept is not None:
            self._kept[first : first + len(states)] = states
            self._is_kept[first : first + len(states)] = True

    def get(self, indices: Tensor) -> Tensor:
        """States of some sequences, `[B, S - 1, hidden]`, on the device of the model."""
        if self._kept is None:
            return self._compute(indices)
        for index in indices[~self._is_kept[indices]].tolist():
            self.put(index, self._compute(torch.tensor([index])))
        return self._kept[indices].to(self._base.device)

    def _compute(self, indices: Tensor) -> Tensor:
        return self._base.states(self._texts.tokens[indices, :-1].long()).to(torch.bfloat16)


def mapped(file: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor that lives in a file, which is made with zeros unless it is there in this size.

    Raises:
        SwiftgenError: if the folder cannot be written or the disk has no room.
    """
    size = math.prod(shape)
    num_bytes = size * dtype.itemsize
    try:
        if not file.exists() or file.stat().st_size != num_bytes:
            with file.open("wb") as handle:
                handle.truncate(num_bytes)
                if hasattr(os, "posix_fallocate"):  # a full disk shows now, not as a crash while writing
                    os.posix_fallocate(handle.fileno(), 0, max(1, num_bytes))
    except OSError as error:
        raise SwiftgenError(
            f"cannot make {file}: {error.strerror or error}", "free some disk space"
        ) from error
    return torch.from_file(str(file), shared=True, size=size, dtype=dtype).view(*shape)
