"""The KV cache of the context, and what a pass sees of a cache.

Keys are stored after RoPE, so a key keeps its absolute position wherever it lies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from swiftgen.forward.spans import SPAN_TOKENS
from swiftgen.system.devices import send

BLOCK_TOKENS = 128
"""Block size B: the prefix of a pass ends at the last multiple of B below its root."""
_SLACK_TOKENS = 8 * BLOCK_TOKENS  # written to a layer with a sliding window before its keys are moved


def sliding_room(window: int | None, num_tokens: int) -> int:
    """Tokens of a text that layers with this window have room for."""
    return num_tokens if window is None else min(num_tokens, window + _SLACK_TOKENS)


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

    def layers_of(self, window: int | None) -> list[int]:
        """The layers with this window, in order."""
        return [layer for layer, own in enumerate(self.layer_windows) if own == window]

    def of_window(self, window: int | None) -> CacheShape:
        """That of a cache for the layers with this window alone."""
        return replace(self, num_layers=len(self.layers_of(window)), windows=())

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
    """What the rows of a pass attend to; all tensors `[layers, num_kv_heads, keys, head_dim]`.

    Layers are those that share a cache: all with the same window.

    The prefix is seen by every row; the tail under the mask of the pass. The last keys and values of the
    tail are the rows' own: the pass writes them before it attends.

    With a sliding window there are also the keys at its edge, which lie before the prefix and are seen by
    some rows of the block and not by others. They are masked, and summed with the tail.

    Attributes:
        edge_keys, edge_values: None where there is no edge.
        edge_begin, tail_begin: Positions of the first key of the edge and of the tail.
        layers: Of the model; the tensors hold them in this order.
    """

    prefix_keys: Tensor
    prefix_values: Tensor
    tail_keys: Tensor
    tail_values: Tensor
    edge_keys: Tensor | None = None
    edge_values: Tensor | None = None
    edge_begin: int = 0
    tail_begin: int = 0
    layers: Sequence[int] = ()

    def tail_with_edge(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of edge and tail of one of its layers, `[num_kv_heads, keys, head_dim]`."""
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


class KeyStore:
    """Keys and values of the layers with one window, at the end of a text or of all of it.

    Attributes:
        keys, values: `[layers, num_kv_heads, room, head_dim]`.
        begin: Position of the first key, a multiple of a block: so a key lies in memory at the same distance
            from the last aligned address wherever it is moved, and kernels treat it alike.
    """

    def __init__(self, shape: CacheShape, room: int, window: int | None, layers: Sequence[int]) -> None:
        self._shape, self._window, self.layers = shape, window, layers
        self.begin = 0
        self.keys, self.values = shape.empty(room, SPAN_TOKENS), shape.empty(room, SPAN_TOKENS)

    def make_room(self, split: int, used: int, end: int) -> None:
        """Have room for keys up to `end`; of those before `used` keep what rows from `split` on see."""
        if end - self.begin <= self.keys.shape[2]:
            return
        assert self._window is not None, "no room for the rows of a pass"
        oldest = max(0, split + 1 - self._window) // BLOCK_TOKENS * BLOCK_TOKENS
        room = max(self.keys.shape[2], end - oldest)
        self.keys, self.values = (
            self._moved(tensor, slice(oldest - self.begin, used - self.begin), room)
            for tensor in (self.keys, self.values)
        )
        self.begin = oldest

    def _moved(self, tensor: Tensor, kept: slice, room: int) -> Tensor:
        numbers = tensor[:, :, kept].clone()
        if room > tensor.shape[2]:
            with torch.inference_mode(mode=False):  # it outlives the pass
                tensor = self._shape.empty(room, SPAN_TOKENS)
        tensor[:, :, : numbers.shape[2]] = numbers
        return tensor

    def between(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of these positions."""
        kept = slice(begin - self.begin, end - self.begin)
        return self.keys[:, :, kept], self.values[:, :, kept]


class FullCache:
    """Keys and values of the whole context, allocated once; in layers with a sliding window of its end.

    Rows of a pass are written behind the committed tokens; `commit` keeps the accepted ones. The prefix
    ends at a block boundary, so it is the same for a position whatever was drafted around it.

    Args:
        capacity: Tokens, including room for the rows of the largest pass.

    Attributes:
        stores: By window.
        keys, values: Of the layers that see all.
    """

    def __init__(self, shape: CacheShape, capacity: int) -> None:
        self.stores = {
            window: KeyStore(
                shape.of_window(window), sliding_room(window, capacity), window, shape.layers_of(window)
            )
            for window in dict.fromkeys((None, *shape.layer_windows))
        }
        self.keys, self.values = self.stores[None].keys, self.stores[None].values
        self.capacity = capacity
        self.length = 0

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for keys and values."""
        return sum(2 * store.keys.numel() * store.keys.element_size() for store in self.stores.values())

    @property
    def used_bytes(self) -> int:
        """Bytes of what has been committed and is kept."""
        return sum(
            2 * (self.length - store.begin) * store.keys[:, :, :1].numel() * store.keys.element_size()
            for store in self.stores.values()
        )

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
        split, used = self.num_prefix_tokens, self.length + first_row
        end = used + num_rows
        assert end <= self.capacity, "no room for the rows of a pass"
        store = self.stores.get(window, self.stores[None])
        store.make_room(split, used, end)
        begin = edge = 0
        if window is not None:
            begin = max(0, split + 1 - window)  # what the first row of the block sees
            edge = min(split, max(0, split + BLOCK_TOKENS - window))  # and the last
        edge_keys, edge_values = store.between(begin, edge) if edge > begin else (None, None)
        return CacheView(
            *store.between(edge, split),
            *store.between(split, end),
            edge_keys=edge_keys,
            edge_values=edge_values,
            edge_begin=begin,
            tail_begin=split,
            layers=store.layers,
        )

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last tree, in this order, and drop the others."""
        begin, end = self.length, self.length + len(rows)
        if list(rows) != list(range(len(rows))):
            for store in self.stores.values():
                index = send(torch.tensor(rows) + (begin - store.begin), self.keys.device)
                for tensor in (store.keys, store.values):
                    tensor[:, :, begin - store.begin : end - store.begin] = tensor.index_select(2, index)
        self.length = end
