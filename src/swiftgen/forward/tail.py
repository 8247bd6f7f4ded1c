"""Scores: those of the tail (the last block and the rows themselves), and their cap."""

from __future__ import annotations

import torch
from torch import Tensor


def tail_scores(q: Tensor, keys: Tensor, mask: Tensor, scaling: float, softcap: float) -> Tensor:
    """Scores of the tail, float64 `[Hkv, G*T, keys]`.

    Args:
        q: `[Hkv, G*T, D]`.
        keys: float64 `[Hkv, keys, D]`.
        mask: Additive, float64, broadcastable to the scores.
        softcap: See `PrefixKernel`.
    """
    if softcap:
        scores = torch.bmm(q.double(), keys.transpose(1, 2)) * (scaling / softcap)
        return mask + softcap * torch.tanh(scores)
    return torch.baddbmm(mask, q.double(), keys.transpose(1, 2), alpha=scaling)


def capped(scores: Tensor, softcap: float) -> Tensor:
    """Scores under a softcap, see `PrefixKernel`."""
    return softcap * torch.tanh(scores / softcap) if softcap else scores
