"""KV caches: all of the context for the verify pass, a chosen part of it for the draft pass.

Keys are stored after RoPE, so a key keeps its absolute position wherever it lies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from swiftgen.forward.spans import SPAN_TOKENS
from swiftgen.system.devices import send

BLOCK_TOKENS = 128
"""Block size B: the prefix of a pass ends at the last multiple of B below its root."""
MAX_DRAFT_ROWS = BLOCK_TOKENS + 16
"""Of the draft passes of one step, padding included."""


@dataclass(frozen=True)
class CacheShape:
    """Dimensions shared by all caches of one model.

    Attributes:
        windows: Sliding window of each layer in tokens, None where a layer sees all; empty if all do.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    windows: tuple[int | None, ...] = ()

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """One window for each layer."""
        return self.windows or (None,) * self.num_layers

    def empty(self, num_tokens: int, spare_tokens: int = 0) -> Tensor:
        """Uninitialised `[num_layers, num_kv_heads, num_tokens, head_dim]`.

        Behind the last head is room for `spare_tokens` more, so that whole spans (see `spans`) can be named
        of every head.
        """
        shape = (self.num_layers, self.num_kv_heads, num_tokens, self.head_dim)
        spare = spare_tokens * self.head_dim
        flat = torch.empty(math.prod(shape) + spare, dtype=self.dtype, device=self.device)
        return flat[: math.prod(shape)].view(shape)


@dataclass(frozen=True)
class CacheView:
    """What the rows of a pass attend to; all tensors `[num_layers, num_kv_heads, keys, head_dim]`.

    The prefix is seen by every row; the tail under the mask of the pass. The last keys and values of the
    tail are the rows' own: the pass writes them before it attends.

    With a sliding window there are also the keys at its edge, which lie before the prefix and are seen by
    some rows of the block and not by others. They are masked, and summed with the tail.

    Attributes:
        edge_keys, edge_values: None where there is no edge.
        edge_begin, tail_begin: Positions of the first key of the edge and of the tail.
    """

    prefix_keys: Tensor
    prefix_values: Tensor
    tail_keys: Tensor
    tail_values: Tensor
    edge_keys: Tensor | None = None
    edge_values: Tensor | None = None
    edge_begin: int = 0
    tail_begin: int = 0

    def tail_with_edge(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of edge and tail, `[num_kv_heads, keys, head_dim]`."""
        keys, values = self.tail_keys[layer], self.tail_values[layer]
        if self.edge_keys is None or self.edge_values is None:
            return keys, values
        return torch.cat([self.edge_keys[layer], keys], 1), torch.cat([self.edge_values[layer], values], 1)


class KVCache(Protocol):
    """What a pass needs of a cache."""

    @property
    def num_tail_tokens(self) -> int:
        """Cached keys before the rows that belong to the tail; every row sees them."""
        ...

    def view(self, num_rows: int, first_row: int, window: int | None = None) -> CacheView:
        """What `num_rows` rows attend to.

        `first_row` counts the rows of the same tree computed before; they are part of the tail. A row of a
        layer with a sliding window sees the keys less than `window` tokens before it.
        """
        ...


class FullCache:
    """Keys and values of the whole context, allocated once.

    Rows of a pass are written behind the committed tokens; `commit` keeps the accepted ones. The prefix
    ends at a block boundary, so it is the same for a position whatever was drafted around it.

    Args:
        capacity: Tokens, including room for the rows of the largest pass.
    """

    def __init__(self, shape: CacheShape, capacity: int) -> None:
        self.keys = shape.empty(capacity, SPAN_TOKENS)
        self.values = shape.empty(capacity, SPAN_TOKENS)
        self.capacity = capacity
        self.length = 0

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for keys and values."""
        return 2 * self.keys.numel() * self.keys.element_size()

    @property
    def num_prefix_tokens(self) -> int:
        """Committed tokens in whole blocks."""
        return self.length - self.length % BLOCK_TOKENS

    @property
    def num_tail_tokens(self) -> int:
        """Committed tokens after the last block boundary."""
        return self.length % BLOCK_TOKENS

    def view(self, num_rows: int, first_row: int, window: int | None = None) -> CacheView:
        """The rows lie behind the committed tokens.

        All rows of a pass lie in the block after the prefix. So where its window begins and where its edge
        ends depends on the block alone, like the prefix itself.
        """
        split, end = self.num_prefix_tokens, self.length + first_row + num_rows
        assert end <= self.capacity, "no room for the rows of a pass"
        begin = edge = 0
        if window is not None:
            begin = max(0, split + 1 - window)  # what the first row of the block sees
            edge = min(split, max(0, split + BLOCK_TOKENS - window))  # and the last
        return CacheView(
            self.keys[:, :, edge:split],
            self.values[:, :, edge:split],
            self.keys[:, :, split:end],
            self.values[:, :, split:end],
            self.keys[:, :, begin:edge] if edge > begin else None,
            self.values[:, :, begin:edge] if edge > begin else None,
            begin,
            split,
        )

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last tree, in this order, and drop the others."""
        begin, end = self.length, self.length + len(rows)
        if list(rows) != list(range(len(rows))):
            index = send(torch.tensor(rows) + begin, self.keys.device)
            self.keys[:, :, begin:end] = self.keys.index_select(2, index)
            self.values[:, :, begin:end] = self.values.index_select(2, index)
        self.length = end


class PartialCache:
    """The KV cache of the draft pass: sinks and the most important tokens, per layer and per KV head.

    Paper, section 3.4: new keys replace the least important ones; when none of the selected ones is
    left, select again by query-key importance, summed over the query heads of a group (GQA). The first
    `num_sinks` tokens always stay. With `by_importance=False` the most recent tokens are kept instead
    (the oldest is replaced first) and nothing is ever selected again.

    Layers with a sliding window need no selection: they read the last tokens of their window from the full
    cache, at most `budget` of them.

    Args:
        budget: Tokens kept per layer and head, sinks included.
    """

    num_tail_tokens = 0  # the tail of a draft pass is what is drafted

    def __init__(self, shape: CacheShape, budget: int, num_sinks: int, by_importance: bool = True) -> None:
        self._shape = shape
        self.keys = shape.empty(budget, SPAN_TOKENS)
        self.values = shape.empty(budget, SPAN_TOKENS)
        self.budget = budget
        self.num_sinks = min(num_sinks, budget - 1)
        self.by_importance = by_importance
        self.length = 0
        self._drafted = shape.empty(MAX_DRAFT_ROWS), shape.empty(MAX_DRAFT_ROWS)
        self.num_selections = 0
        self._victims: list[int] = []  # slots to overwrite, next one last
        self._full: FullCache | None = None  # the cache that is followed
        self._layers = [layer for layer, window in enumerate(shape.layer_windows) if window is None]

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for keys and values."""
        return 2 * self.keys.numel() * self.keys.element_size()

    def view(self, num_rows: int, first_row: int, window: int | None = None) -> CacheView:
        """The selection is the prefix; the rows of the tree so far are the whole tail."""
        end = first_row + num_rows
        assert end <= MAX_DRAFT_ROWS, "no room for the rows of a draft pass"
        rows = self._drafted[0][:, :, :end], self._drafted[1][:, :, :end]
        if window is None or self._full is None:
            return CacheView(self.keys[:, :, : self.length], self.values[:, :, : self.length], *rows)
        length = self._full.length
        begin = max(0, length - min(window - 1, self.budget))
        keys, values = self._full.keys[:, :, begin:length], self._full.values[:, :, begin:length]
        return CacheView(keys, values, *rows, tail_begin=length)

    def update(self, full: FullCache, begin: int, queries: Tensor) -> None:
        """Follow the full cache, which has grown from `begin` to its present length.

        Args:
            queries: Those of the last committed token, `[num_layers, num_kv_heads, group, head_dim]`.
        """
        self._full = full
        if not self._layers:
            return
        num_new = full.length - begin
        num_free = min(num_new, self.budget - self.length)
        if num_new - num_free > len(self._victims):
            self.select(full, queries)
            return
        slots = list(range(self.length, self.length + num_free))
        slots += [self._victims.pop() for _ in range(num_new - num_free)]
        self.length += num_free
        index = send(torch.tensor(slots), self.keys.device)
        self.keys.index_copy_(2, index, full.keys[:, :, begin : full.length])
        self.values.index_copy_(2, index, full.values[:, :, begin : full.length])
        if not self.by_importance:
            self._victims[:0] = [slot for slot in reversed(slots) if slot >= self.num_sinks]

    def select(self, full: FullCache, queries: Tensor) -> None:
        """Choose anew which tokens of the full cache to keep."""
        self.length = min(full.length, self.budget)
        for layer in self._layers:
            chosen = self._choose(full.keys[layer, :, : full.length], queries[layer])  # [heads, kept]
            gather = chosen.unsqueeze(-1).expand(-1, -1, self.keys.shape[-1])
            self.keys[layer, :, : self.length] = full.keys[layer].gather(1, gather)
            self.values[layer, :, : self.length] = full.values[layer].gather(1, gather)
        order = range(self.num_sinks, self.length)
        self._victims = list(order if self.by_importance else reversed(order))
        self.num_selections += 1

    def _choose(self, keys: Tensor, queries: Tensor) -> Tensor:
        """Sinks first, then by falling importance (or rising age); token indices `[heads, kept]`."""
        num_tokens = keys.shape[1]
        sinks = torch.arange(min(self.num_sinks, self.length), device=keys.device)
        num_chosen = self.length - len(sinks)
        if self.by_importance:
            scores = torch.einsum("hgd,hnd->hn", queries.float(), keys.float())
            scores[:, : len(sinks)] = float("-inf")
            chosen = scores.topk(num_chosen, dim=1).indices
        else:
            chosen = torch.arange(num_tokens - num_chosen, num_tokens, device=keys.device)
            chosen = chosen.expand(keys.shape[0], -1)
        return torch.cat([sinks.expand(keys.shape[0], -1), chosen], dim=1)
