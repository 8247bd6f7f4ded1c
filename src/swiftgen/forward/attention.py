"""Attention of one pass: a prefix every row sees, and a short tail summed in an order-free way.

The prefix is one kernel call that returns its log-sum-exp. The tail (the last block and the rows
themselves, under the tree mask) is summed in float64, where the order in which drafts lie in memory
does not survive the rounding to the model's dtype. So are the keys at the edge of a sliding window, which
some of the rows see. The prefix enters the softmax of the tail as if it
were a few more keys, whose scores are its log-sum-exps and whose values are its outputs: that is the
merge by log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from swiftgen.forward.cache import CacheView, KVCache
from swiftgen.forward.passes import TorchPass
from swiftgen.forward.tail import capped, tail_scores
from swiftgen.system.devices import send
from swiftgen.system.errors import SwiftgenError

_NAME = "swiftgen"
SPLIT_PREFIX_TOKENS = 1024
"""From here on the CPU computes a prefix in two halves (if it is even), so that few heads use all cores."""

PrefixKernel = Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]
"""(q [Hkv, G*T, D], k [Hkv, b, D], v [Hkv, b, D], scale, softcap) -> out [Hkv, S, G*T, D], lse [Hkv, S, G*T].

A softcap c other than 0 turns a score s into `c * tanh(s / c)`."""


class TreePass(TorchPass):
    """A pass whose shapes follow the text; see `Pass`.

    Args:
        seen: For each layer what its rows attend to (it gets their keys and values), and the mask of tail
            and edge, additive, float64 `[1, group * T, keys]`: 0 where a row sees a key, -inf elsewhere.
        prefix_kernel: How the prefix is computed on this device.
    """

    def __init__(self, seen: Sequence[tuple[CacheView, Tensor]], prefix_kernel: PrefixKernel) -> None:
        super().__init__()
        self._seen, self._prefix_kernel = seen, prefix_kernel

    def attend_rotated(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, softcap: float = 0.0
    ) -> Tensor:
        """See `TorchPass`."""
        num_kv_heads, num_rows, head_dim = k.shape
        view, mask = self._seen[layer]
        layer = view.layers.index(layer)
        keys, values = view.tail_keys[layer], view.tail_values[layer]
        keys[:, -num_rows:], values[:, -num_rows:] = k, v
        self._queries.append(q.view(num_kv_heads, -1, num_rows, head_dim))

        keys, values = (tensor.double() for tensor in view.tail_with_edge(layer))
        scores = tail_scores(q, keys, mask, scaling, softcap)
        if not view.prefix_keys.shape[2]:
            merged = torch.bmm(torch.softmax(scores, dim=-1), values)
        else:
            prefix_keys, prefix_values = view.prefix_keys[layer], view.prefix_values[layer]
            out, lse = self._prefix_kernel(q, prefix_keys, prefix_values, scaling, softcap)
            num_parts = lse.shape[1]
            weights = torch.softmax(torch.cat([lse.transpose(1, 2), scores], dim=-1), dim=-1)
            merged = torch.bmm(weights[..., num_parts:], values)
            for part in range(num_parts):
                merged.addcmul_(weights[..., part, None], out[:, part].double())
        return merged.to(q.dtype).view(-1, num_rows, head_dim)


def seen_keys(view: CacheView, visible: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Which keys of edge and tail each row sees, bool `[T, keys]`.

    Args:
        view: Of this window.
        visible, positions: See `new_tree_pass`.
        window: A row sees the keys less than this many tokens before it, or all.
    """
    num_rows_so_far = visible.shape[1]
    num_committed = view.tail_keys.shape[2] - num_rows_so_far
    if window is None:
        return torch.nn.functional.pad(visible, (num_committed, 0), value=True)
    num_edge = 0 if view.edge_keys is None else view.edge_keys.shape[2]
    edge = torch.arange(num_edge) + view.edge_begin
    committed = torch.arange(num_committed) + view.tail_begin
    oldest = positions[num_rows_so_far - len(visible) :].unsqueeze(1) - window + 1  # [T, 1]
    near = torch.cat([edge, committed, positions]) >= oldest
    near[:, num_edge + num_committed :] &= visible
    return near


def new_tree_pass(
    cache: KVCache,
    windows: Sequence[int | None],
    visible: Tensor,
    positions: Tensor,
    group: int,
    kernel: PrefixKernel,
) -> TreePass:
    """A pass over the last T rows of a tree; those before have been computed.

    Args:
        windows: Sliding window of each layer, None where a layer sees all.
        visible: Which row sees which, bool `[T, rows of the tree so far]`.
        positions: Of the rows of the tree so far.
        group: Query heads of a KV head.
    """
    num_rows, num_so_far = visible.shape
    seen: dict[int | None, tuple[CacheView, Tensor]] = {}
    for window in dict.fromkeys(windows):
        view = cache.view(num_rows, num_so_far - num_rows, window)
        mask = _additive(seen_keys(view, visible, positions, window), group)
        seen[window] = view, send(mask, view.tail_keys.device)
    return TreePass([seen[window] for window in windows], kernel)


def _additive(seen: Tensor, group: int) -> Tensor:
    """A mask, repeated for the query heads of a KV head, which attend together."""
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill_(~seen, float("-inf"))
    return mask.repeat(group, 1).unsqueeze(0)


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    tree_pass: TorchPass,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """The attention of a pass as transformers calls it, for layers that are not fused.

    Args:
        query, key, value: After RoPE: `[1, H, T, D]`, `[1, Hkv, T, D]`, `[1, Hkv, T, D]`.
        softcap: See `PrefixKernel`; None is 0.
        s_aux: Learned scores of no key (gpt-oss).

    Returns:
        `[1, T, H, D]` in the dtype of `query`, and no attention weights.

    Raises:
        SwiftgenError: with `s_aux`, which no kernel here knows.
    """
    if s_aux is not None:
        raise SwiftgenError("models with attention sinks are not supported", "Use a model of another family.")
    q = query.reshape(key.shape[1], -1, query.shape[-1])
    attended = tree_pass.attend_rotated(module.layer_idx, q, key[0], value[0], scaling, softcap or 0.0)
    return attended.transpose(0, 1).unsqueeze(0), None


def cpu_prefix(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float = 0.0) -> tuple[Tensor, Tensor]:
    """Prefix by PyTorch's CPU flash kernel; the split depends on the prefix length alone.

    The kernel knows no softcap; with one, matrix products do it.
    """
    if softcap:
        return sdpa_prefix(q, k, v, scale, softcap)
    num_keys = k.shape[1]
    return cpu_flash(q, k, v, scale, None, 2 if num_keys >= SPLIT_PREFIX_TOKENS and num_keys % 2 == 0 else 1)


def cpu_flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, num_parts: int = 1
) -> tuple[Tensor, Tensor]:
    """PyTorch's CPU flash kernel over keys cut into equal parts; see `PrefixKernel`.

    Args:
        mask: Additive, `[G*T, keys]`, in the dtype of `q`; only with one part.
    """
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.unsqueeze(1).expand(-1, num_parts, -1, -1),
        k.unflatten(1, (num_parts, -1)),
        v.unflatten(1, (num_parts, -1)),
        0.0,
        False,
        attn_mask=mask,
        scale=scale,
    )
    return out, lse


def sdpa_prefix(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float = 0.0) -> tuple[Tensor, Tensor]:
    """Prefix in plain matrix products with float32 scores: any device, no extra package."""
    scores = capped(torch.bmm(q.float(), k.float().transpose(1, 2)) * scale, softcap)
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.bmm(torch.exp(scores - lse.unsqueeze(-1)), v.float())
    return out.unsqueeze(1), lse.unsqueeze(1)


def flash_attn_installed() -> bool:
    """Whether the package is there; whether it runs shows when it is used."""
    from importlib.util import find_spec

    return find_spec("flash_attn") is not None


def use_tree_attention(model: PreTrainedModel) -> None:
    """Let the layers of a model attend by `tree_attention`, to what their pass says."""
    AttentionInterface.register(_NAME, tree_attention)
    AttentionMaskInterface.register(_NAME, lambda *_, **__: None)  # the tree mask travels with the pass
    model.set_attn_implementation(_NAME)
