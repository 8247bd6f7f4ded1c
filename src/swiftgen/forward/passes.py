"""What a pass is to the layers of a model: they hand it their projections, it attends.

How it attends is its own affair: by the native kernels (`native_pass`), or by PyTorch's operators, with
shapes that follow the text (`attention`) or static ones (`static_pass`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from swiftgen.native import structs

Rotary = tuple[Tensor, Tensor]
"""Cosine and signed sine of the rows, `[T, 1, D]` each, see `rotary.SignedRotary`."""
Rotaries = Mapping[str | None, Rotary]
"""Those of each kind of layer that has its own, see `architectures.layer_rotaries`."""


@dataclass(frozen=True)
class Heads:
    """The attention heads of a layer.

    Args:
        num_heads, num_kv_heads: H query heads, Hkv heads of keys and values.
        scaling: Factor of the scores.
        norms: Weights `[D]` of the RMSNorms of query and key heads, and their epsilon.
        cap: See `attention.PrefixKernel`.
    """

    num_heads: int
    num_kv_heads: int
    scaling: float
    norms: tuple[Tensor, Tensor, float] | None = None
    cap: float = 0.0

    @cached_property
    def described(self) -> structs.Heads:
        """For the native kernels."""
        q, k, eps = self.norms or (None, None, 0.0)
        return structs.Heads(structs.Norm(q, eps), structs.Norm(k, eps), self.scaling, self.cap)


class Pass(Protocol):
    """One pass over T rows: where their keys go, what they see, and the queries they asked with."""

    def attend(self, layer: int, qkv: Tensor, rotary: Rotary, heads: Heads) -> Tensor:
        """Head norms and RoPE, write keys and values to the cache, attend.

        Args:
            layer: Its index.
            qkv: Queries, keys and values side by side, `[1, T, (H + 2 Hkv) * D]`.

        Returns:
            `[1, T, H * D]`.
        """
        ...

    def stacked_queries(self) -> Tensor:
        """The queries of all layers, used to rank keys by importance: `[num_layers, Hkv, G, T, D]`."""
        ...


class TorchPass(ABC):
    """A pass by PyTorch's operators."""

    def __init__(self) -> None:
        self._queries: list[Tensor] = []  # of each layer so far, [Hkv, G, T, D]

    def attend(self, layer: int, qkv: Tensor, rotary: Rotary, heads: Heads) -> Tensor:
        """See `Pass`."""
        num_rows, num_heads, num_kv_heads = qkv.shape[1], heads.num_heads, heads.num_kv_heads
        qkv = qkv.view(num_rows, num_heads + 2 * num_kv_heads, -1)  # [T, H + 2 Hkv, D]
        qk, v = qkv[:, : num_heads + num_kv_heads], qkv[:, num_heads + num_kv_heads :]
        head_dim = qkv.shape[2]
        if heads.norms:
            q_norm, k_norm, eps = heads.norms
            q = rms_norm(qk[:, :num_heads], (head_dim,), q_norm, eps)
            qk = torch.cat([q, rms_norm(qk[:, num_heads:], (head_dim,), k_norm, eps)], dim=1)
        cos, signed_sin = rotary
        qk = torch.addcmul(qk * cos, qk.roll(head_dim // 2, dims=-1), signed_sin)
        q, k = qk[:, :num_heads], qk[:, num_heads:]
        attended = self.attend_rotated(
            layer,
            q.transpose(0, 1).reshape(num_kv_heads, -1, head_dim),
            k.transpose(0, 1),
            v.transpose(0, 1),
            heads.scaling,
        )  # [H, T, D]
        return attended.transpose(0, 1).reshape(1, num_rows, -1)

    @abstractmethod
    def attend_rotated(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, softcap: float = 0.0
    ) -> Tensor:
        """Write the keys and values of a layer to the cache, and attend.

        Args:
            q: After RoPE, contiguous, the query heads of a KV head together: `[Hkv, G*T, D]`.
            k, v: `[Hkv, T, D]`, keys after RoPE.
            scaling: Factor of the scores.
            softcap: See `attention.PrefixKernel`.

        Returns:
            `[H, T, D]` in the dtype of `q`.
        """

    def stacked_queries(self) -> Tensor:
        """See `Pass`."""
        return torch.stack(self._queries)


@dataclass(frozen=True)
class PassOutput:
    """Results of one pass, live rows only.

    Args:
        hidden: Hidden states before the final norm, `[T, hidden]`.
        queries: `[num_layers, Hkv, G, T, D]`.
        logits: Gives them, float32 `[T, vocab]`; most passes are made for something else. The caller may
            overwrite them.
    """

    hidden: Tensor
    queries: Tensor
    logits: Callable[[], Tensor]

    @staticmethod
    def joined(parts: Sequence[PassOutput]) -> PassOutput:
        """The rows of several passes as if they were one."""
        if len(parts) == 1:
            return parts[0]
        return PassOutput(
            torch.cat([part.hidden for part in parts]),
            torch.cat([part.queries for part in parts], dim=3),
            lambda: torch.cat([part.logits() for part in parts]),
        )
