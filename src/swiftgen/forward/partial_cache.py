"""The KV cache of draft passes: a chosen part of the context."""

from __future__ import annotations

import torch
from torch import Tensor

from swiftgen.forward.cache import BLOCK_TOKENS, CacheShape, CacheView, FullCache
from swiftgen.forward.spans import SPAN_TOKENS
from swiftgen.system.devices import send

MAX_DRAFT_ROWS = BLOCK_TOKENS + 16
"""Of the draft passes of one step, padding included."""


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
        seeing_all = shape.of_window(None)
        self.keys = seeing_all.empty(budget, SPAN_TOKENS)
        self.values = seeing_all.empty(budget, SPAN_TOKENS)
        self.budget = budget
        self.num_sinks = min(num_sinks, budget - 1)
        self.by_importance = by_importance
        self.length = 0
        self._drafted = {
            window: [shape.of_window(window).empty(MAX_DRAFT_ROWS) for _ in range(2)]
            for window in dict.fromkeys((None, *shape.layer_windows))
        }
        self.num_selections = 0
        self._victims: list[int] = []  # slots to overwrite, next one last
        self._full: FullCache | None = None  # the cache that is followed
        self._layers = shape.layers_of(None)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for keys and values."""
        return 2 * self.keys.numel() * self.keys.element_size()

    def view(self, num_rows: int, first_row: int, window: int | None = None) -> CacheView:
        """The selection is the prefix; the rows of the tree so far are the whole tail."""
        end = first_row + num_rows
        assert end <= MAX_DRAFT_ROWS, "no room for the rows of a draft pass"
        drafted = self._drafted.get(window, self._drafted[None])
        keys, values = (tensor[:, :, :end] for tensor in drafted)
        if window is None or self._full is None:
            selected = self.keys[:, :, : self.length], self.values[:, :, : self.length]
            return CacheView(*selected, keys, values, layers=self._layers)
        length, store = self._full.length, self._full.stores.get(window, self._full.stores[None])
        begin = max(0, length - min(window - 1, self.budget))
        return CacheView(*store.between(begin, length), keys, values, tail_begin=length, layers=store.layers)

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
        for place, layer in enumerate(self._layers):
            chosen = self._choose(full.keys[place, :, : full.length], queries[layer])  # [heads, kept]
            gather = chosen.unsqueeze(-1).expand(-1, -1, self.keys.shape[-1])
            self.keys[place, :, : self.length] = full.keys[place].gather(1, gather)
            self.values[place, :, : self.length] = full.values[place].gather(1, gather)
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
