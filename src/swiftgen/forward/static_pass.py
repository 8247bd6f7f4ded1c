"""The pass with static shapes: what a CUDA graph can hold.

A pass of a few rows on a GPU starts some forty kernels a layer, and starting them takes longer than computing
them. A graph starts all of them at once, but its shapes and addresses are fixed. So here nothing depends on
the length of the text: the prefix is a number of spans whose lengths are on the device, the tail is always
one block and the rows, gathered and masked, and keys and values are written to places that are on the device
too. All that changes goes up in one copy. What is computed is what `attention.TreePass` computes.

A graph is kept for each number of rows and of spans. Spans come in powers of two, so a text of 100,000 tokens
needs six of each. On a CPU the same runs without a graph, for the tests.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from swiftgen.forward.cache import BLOCK_TOKENS, FullCache
from swiftgen.forward.passes import TorchPass
from swiftgen.forward.spans import SPAN_TOKENS, SpanPrefix, span_lengths
from swiftgen.forward.tail import tail_scores
from swiftgen.forward.tree import DraftTree
from swiftgen.system.errors import first_line

logger = logging.getLogger(__name__)


class StaticOutput(NamedTuple):
    """Results of the rows of a pass.

    Args:
        hidden: Before the final norm, `[T, hidden]`.
        queries: `[num_layers, Hkv, G, T, D]`.
        logits: float32 `[T, vocab]`.
    """

    hidden: Tensor
    queries: Tensor
    logits: Tensor


Compute = Callable[[Tensor, Tensor, "StaticPass"], tuple[Tensor, Tensor]]
"""(token ids `[1, T]`, positions `[1, T]`, the pass) -> hidden `[T, hidden]`, logits `[T, vocab]`."""


class StaticPasses:
    """The passes of a target over one cache.

    Args:
        compute: Sends rows through the model; its layers call `Pass.attend`.
        prefix: Computes the prefix.
        cache: What they attend to. Keys that no row sees are read and weigh nothing, so they must be numbers:
            what lies behind the committed tokens is set to 0.
        group: Query heads of a KV head.
    """

    def __init__(self, compute: Compute, prefix: SpanPrefix, cache: FullCache, group: int) -> None:
        self._compute, self._prefix, self._group = compute, prefix, group
        self._keys, self._values = cache.keys, cache.values  # not the cache itself, which owns these passes
        self._keys[:, :, cache.length :].zero_()
        self._values[:, :, cache.length :].zero_()
        self._max_spans = -(-cache.capacity // SPAN_TOKENS)
        self._passes: dict[tuple[int, int, int], StaticPass] = {}
        self._graphs = _Graphs(cache.keys.device) if cache.keys.is_cuda else None

    def run(self, tree: DraftTree, first: int, size: int, position: int) -> StaticOutput:
        """One pass over the nodes of a tree from `first` on, padded to `size` rows.

        Args:
            position: Of the root; the cache holds as many tokens.
        """
        static = self._pass(size, first, position)
        static.fill(tree, position)
        return static.run()

    def make_ready(self, sizes: Iterable[int], position: int) -> None:
        """Capture the graphs of passes at this position, so that no step has to wait for it."""
        if self._graphs:
            for size in sizes:
                self.run(DraftTree(0, max_depth=0), 0, size, position)

    def _pass(self, size: int, first: int, position: int) -> StaticPass:
        num_used = max(1, -(-(position - position % BLOCK_TOKENS) // SPAN_TOKENS))
        num_spans = min(1 << (num_used - 1).bit_length(), self._max_spans)
        key = size, first, num_spans
        if key not in self._passes:
            caches = self._keys, self._values
            self._passes[key] = StaticPass(
                self._compute, self._prefix, caches, self._group, *key, graphs=self._graphs
            )
        return self._passes[key]


class StaticPass(TorchPass):
    """A pass over a fixed number of rows.

    Args:
        size: Rows.
        first: Rows of the same tree computed before; they are part of the tail.
        num_spans: Spans that the prefix is cut into; some may be empty.
        graphs: None runs it without a graph.
    """

    def __init__(
        self,
        compute: Compute,
        prefix: SpanPrefix,
        caches: tuple[Tensor, Tensor],
        group: int,
        size: int,
        first: int,
        num_spans: int,
        graphs: _Graphs | None,
    ) -> None:
        super().__init__()
        self._compute, self._prefix, self._group = compute, prefix, group
        self._keys, self._values = caches
        self._size, self._first, self._num_spans = size, first, num_spans
        num_tail = BLOCK_TOKENS + first + size
        shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "token_ids": (torch.int64, (1, size)),
            "positions": (torch.int64, (1, size)),
            "slots": (torch.int64, (size,)),
            "tail": (torch.int64, (num_tail,)),
            "lengths": (torch.int32, (num_spans,)),
            "seen": (torch.bool, (size, num_tail)),
        }
        self._inputs = _Inputs(shapes, caches[0].device)
        self._graphs = graphs
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: StaticOutput | None = None
        self._mask = torch.empty(0)

    def fill(self, tree: DraftTree, position: int) -> None:
        """Say what the next run is about; returns before the device has it."""
        size, first = self._size, self._first
        live = min(len(tree) - first, size)
        begin = position - position % BLOCK_TOKENS
        num_committed, num_rows = position - begin, first + size
        rows, padding = slice(first, first + live), size - live
        tail = torch.arange(begin, begin + BLOCK_TOKENS + num_rows)
        seen = torch.zeros(size, len(tail), dtype=torch.bool)
        seen[:, :num_committed] = True
        seen[:, num_committed : num_committed + num_rows] = tree.visibility(num_rows)[first:]
        self._inputs.fill(
            token_ids=torch.tensor([tree.tokens[rows] + tree.tokens[:1] * padding]),
            positions=torch.tensor([tree.depths[rows] + [0] * padding]) + position,
            slots=torch.arange(position + first, position + num_rows),
            tail=tail.clamp_(max=self._keys.shape[2] - 1),  # beyond is nothing that a row sees
            lengths=span_lengths(begin, self._num_spans),
            seen=seen,
        )

    def run(self) -> StaticOutput:
        """Compute what `fill` described; the results are the caller's own."""
        if self._graphs is None:
            return self._computed()
        if self._graph is None:
            self._graph, self._outputs = self._graphs.capture(self._computed)
        if self._graph is None:  # it could not be captured
            return self._computed()
        self._graph.replay()
        assert self._outputs is not None
        return StaticOutput(*(output.clone() for output in self._outputs))

    def attend_rotated(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, softcap: float = 0.0
    ) -> Tensor:
        """See `TorchPass`."""
        num_kv_heads, num_rows, head_dim = k.shape
        keys, values, inputs = self._keys[layer], self._values[layer], self._inputs
        keys.index_copy_(1, inputs["slots"], k)
        values.index_copy_(1, inputs["slots"], v)
        self._queries.append(q.view(num_kv_heads, -1, num_rows, head_dim))

        tail_keys = keys.index_select(1, inputs["tail"]).double()
        tail_values = values.index_select(1, inputs["tail"]).double()
        scores = tail_scores(q, tail_keys, self._mask, scaling, softcap)
        out, lse = self._prefix.over(q, keys, values, inputs["lengths"], scaling, softcap)
        weights = torch.softmax(torch.cat([lse.permute(1, 2, 0), scores], dim=-1), dim=-1)
        merged = torch.bmm(weights[..., self._num_spans :], tail_values)
        # Each row of each head weighs its own outputs of the spans.
        of_spans = weights[..., : self._num_spans].transpose(0, 1).flatten(0, 1).unsqueeze(1)
        weighed = torch.bmm(of_spans, out.permute(1, 2, 0, 3).flatten(0, 1).double())
        merged += weighed.view(-1, num_kv_heads, head_dim).transpose(0, 1)
        return merged.to(q.dtype).view(-1, num_rows, head_dim)

    def _computed(self) -> StaticOutput:
        seen = self._inputs["seen"].repeat(self._group, 1)
        mask = torch.zeros(seen.shape, dtype=torch.float64, device=seen.device)
        self._mask = mask.masked_fill_(~seen, float("-inf")).unsqueeze(0)
        self._queries = []  # a capture that failed has left some
        hidden, logits = self._compute(self._inputs["token_ids"], self._inputs["positions"], self)
        queries = self.stacked_queries()
        self._queries = []  # a graph must not keep those of each layer
        return StaticOutput(hidden, queries, logits)


class _Inputs:
    """Tensors on a device that are filled together by one copy.

    Args:
        shapes: dtype and shape of each, by name.
    """

    def __init__(self, shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device) -> None:
        self._places: dict[str, tuple[slice, torch.dtype, tuple[int, ...]]] = {}
        end = 0
        for name, (dtype, shape) in shapes.items():
            begin = -(-end // 8) * 8
            end = begin + math.prod(shape) * dtype.itemsize
            self._places[name] = slice(begin, end), dtype, shape
        self._buffer = torch.zeros(end, dtype=torch.uint8, device=device)
        self._views = {name: self._view(self._buffer, name) for name in shapes}

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]

    def fill(self, **values: Tensor) -> None:
        """Set all of them from tensors on the CPU."""
        # A fresh one each time: PyTorch keeps pinned memory until the copy from it is done.
        host = torch.empty(len(self._buffer), dtype=torch.uint8, pin_memory=self._buffer.is_cuda)
        for name, value in values.items():
            self._view(host, name).copy_(value)
        self._buffer.copy_(host, non_blocking=True)

    def _view(self, buffer: Tensor, name: str) -> Tensor:
        place, dtype, shape = self._places[name]
        return buffer[place].view(dtype).view(shape)


class _Graphs:
    """Captures CUDA graphs, which share their work memory: they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._usable = True

    def capture(
        self, compute: Callable[[], StaticOutput]
    ) -> tuple[torch.cuda.CUDAGraph | None, StaticOutput | None]:
        """A graph of `compute` and where it leaves its results; None, and a warning, if there can be none."""
        if not self._usable:
            return None, None
        here = torch.cuda.current_stream(self._device)
        side = torch.cuda.Stream(self._device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            compute()  # what libraries do on first use cannot be captured
        here.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(here), torch.cuda.graph(graph, pool=self._pool):
                outputs = compute()
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._usable = False
            torch.cuda.synchronize(self._device)
            logger.warning("passes run without CUDA graphs, which is slower: %s", first_line(error))
            return None, None
        return graph, outputs
