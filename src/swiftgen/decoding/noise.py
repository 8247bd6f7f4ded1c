"""Keyed noise: Gumbel noise of a seed, a position and a token, hashed from them without any state."""

from __future__ import annotations

import torch
from torch import Tensor

# Multipliers of splitmix64 (Steele et al. 2014) as signed 64-bit integers; products wrap.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX2 = 0x94D049BB133111EB - (1 << 64)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's own is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    x = (x ^ _shift_right(x, 30)) * _MIX1
    x = (x ^ _shift_right(x, 27)) * _MIX2
    return x ^ _shift_right(x, 31)


def keyed_gumbel(seed: int, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise g(seed, position, token), float64, in the broadcast shape.

    Args:
        positions, token_ids: int64, broadcastable against each other.
    """
    key = torch.tensor(seed, dtype=torch.int64)  # a number to any device
    key = _mix(_mix(key * _GOLDEN + 1) + positions * _GOLDEN)
    bits = _mix(key + token_ids * _GOLDEN)
    uniform = (_shift_right(bits, 12).double() + 0.5) * 2.0**-52  # exact, so never 0 or 1
    return -torch.log(-torch.log(uniform))
