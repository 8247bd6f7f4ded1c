"""Weights in few bits, in the order in which the kernels read them (`native/formats.h`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 16
"""Output features that lie together; a weight has a multiple of them."""
BLOCK = 32
"""Inputs that share a scale, or have two."""
Q8_0 = 8
"""Number of the type in GGUF files."""


@dataclass(frozen=True)
class PackedWeight:
    """A weight `[out, in]`.

    Args:
        type_number: Of its type, as in GGUF files.
        data: uint8, see `native/formats.h`.
    """

    type_number: int
    out_features: int
    in_features: int
    data: Tensor


def rows_in_8_bits(weight: Tensor) -> Tensor:
    """A weight `[out, in]` as rows of Q8_0, to the nearest step: uint8 `[out, in / 32 * 34]`.

    For what need not be exact, like drafts.
    """
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    scales = (blocks.abs().amax(dim=-1, keepdim=True) / 127).half()
    steps = scales.float().clamp(min=torch.finfo(torch.float16).tiny)
    codes = (blocks / steps).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)], dim=-1).flatten(1)
