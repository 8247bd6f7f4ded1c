"""What a GPU allows: bytes and operations of a pass, tokens per second, from data sheets; without a GPU.

    python tests/tools/roofline.py            the tables that docs/gpu.md quotes
    python tests/tools/roofline.py --json     one line of JSON

A pass takes as long as the slower of its reads and its arithmetic, plus what each kernel takes at least. The
kernels of a pass are counted, not guessed: a pass over a small model with static shapes is run on the CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROWS = (2, 8, 16, 32, 64)
CONTEXTS = (20_000, 50_000, 100_000)
BF16, FP32, FP64 = 2, 4, 8
READ_SHARE, COMPUTE_SHARE, FP64_SHARE = 0.85, 0.5, 0.25
"""Of the data sheet, what good kernels reach: streaming reads, narrow products, batched float64 products."""
KERNEL_US, LAUNCH_US, HOST_US = 2.0, 6.0, 600.0
"""The least time of a small kernel inside a graph, starting one from Python, and what the host does between
two passes (tree, plan, inputs, wait for the picks). To be measured; see docs/gpu.md."""
HEAD_LEVELS, DRAFT_CONTEXT, DRAFT_VOCABULARY = 3, 4096, 16_384
SPAN_TOKENS, TAIL_TOKENS = 4096, 128
SAMPLER_PASSES = 30
"""Times that sampling goes over the vocabulary, reading and writing 8 bytes each time."""


@dataclass(frozen=True)
class Gpu:
    """From its data sheet: GB/s of its memory, TFLOP/s of dense bfloat16 and of float64 on tensor cores."""

    name: str
    gb_per_s: float
    bf16_tflops: float
    fp64_tflops: float


@dataclass(frozen=True)
class Model:
    """From its config.json."""

    name: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int

    @property
    def read_parameters(self) -> int:
        """Parameters that a pass reads: all but the embeddings."""
        attention = self.hidden * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate
        return self.num_layers * layer + self.hidden * self.vocab

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * BF16


GPUS = (
    Gpu("A100-80GB", 2039, 312, 19.5),
    Gpu("H100", 3350, 989, 67),
    Gpu("H200", 4800, 989, 67),
)
MODELS = (
    Model("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, 128_256),
    Model("Qwen2.5-14B", 48, 5120, 13824, 40, 8, 128, 152_064),
)
BY_HEADS, BY_PASS = (1.3, 1.9), (3.6, 4.6)
"""Tokens of a step: heads of the default preset (from, to); the paper, 1 + 4 x acceptance of 0.64, 0.90."""


@dataclass(frozen=True)
class Pass:
    """A pass of a number of rows: what it moves and computes, and how long that takes.

    Args:
        small_kernels: Kernels that take their least time, in all layers.
    """

    model: Model
    gpu: Gpu
    context: int
    rows: int
    small_kernels: int

    @property
    def weight_bytes(self) -> float:
        return self.model.read_parameters * BF16

    @property
    def kv_bytes(self) -> float:
        return self.model.kv_bytes_per_token * self.context

    @property
    def merge_bytes(self) -> float:
        """Queries and outputs of the spans, which operators of PyTorch weigh and add: 24 bytes a value."""
        num_spans = 1 << (-(-self.context // SPAN_TOKENS) - 1).bit_length()
        values = self.rows * self.model.num_heads * self.model.head_dim
        return self.model.num_layers * num_spans * values * 24

    @property
    def sampling_bytes(self) -> float:
        return self.rows * self.model.vocab * 2 * FP64 * SAMPLER_PASSES

    @property
    def flops(self) -> float:
        attention = 4 * self.model.num_layers * self.model.num_heads * self.model.head_dim * self.context
        return self.rows * (2 * self.model.read_parameters + attention)

    @property
    def tail_flops(self) -> float:
        """In float64."""
        keys = TAIL_TOKENS + self.rows
        return 4 * self.model.num_layers * self.model.num_heads * self.model.head_dim * keys * self.rows

    @property
    def ideal_ms(self) -> float:
        """Weights and KV cache at the full rate of the data sheet, nothing else."""
        return (self.weight_bytes + self.kv_bytes) / self.gpu.gb_per_s * 1e-6

    def parts_ms(self) -> dict[str, float]:
        """Where the time of a step goes."""
        read = (self.weight_bytes + self.kv_bytes) / (self.gpu.gb_per_s * READ_SHARE) * 1e-6
        compute = self.flops / (self.gpu.bf16_tflops * COMPUTE_SHARE) * 1e-9
        return {
            "weights and KV": max(read, compute),
            "merging spans": self.merge_bytes / (self.gpu.gb_per_s * READ_SHARE) * 1e-6,
            "float64 tail": self.tail_flops / (self.gpu.fp64_tflops * FP64_SHARE) * 1e-9,
            "small kernels": self.small_kernels * KERNEL_US * 1e-3,
            "sampling": self.sampling_bytes / (self.gpu.gb_per_s * READ_SHARE) * 1e-6,
            "host": HOST_US * 1e-3,
        }

    @property
    def step_ms(self) -> float:
        return sum(self.parts_ms().values())


def kernels_per_layer() -> int:
    """Kernels that a layer of a static pass starts beside its four matrix products and the prefix."""
    sys.path.append(str(Path(__file__).parents[1]))
    import torch

    from support.tiny import backend_for, tiny_model
    from swiftgen.forward.cache import FullCache
    from swiftgen.forward.spans import SpanPrefix
    from swiftgen.forward.target import Target
    from swiftgen.forward.tree import DraftTree

    def one_kernel(q: Any, k: Any, v: Any, lengths: Any, scale: float, softcap: float) -> Any:
        queries = q.expand(len(k), -1, -1, -1).contiguous()
        return torch.empty_like(queries), queries.new_empty(len(k), q.shape[1], len(q))

    counts = []
    for num_layers in (1, 2):
        model = tiny_model("llama")
        model.model.layers = model.model.layers[:num_layers]
        backend = replace(backend_for(model, "sdpa"), static_prefix=SpanPrefix(one_kernel, ""))
        target = Target(model, backend)
        cache = FullCache(target.cache_shape, 20 * SPAN_TOKENS)
        cache.length = 16 * SPAN_TOKENS
        target.forward(DraftTree(0, 0), cache.length, cache, 8)
        with counted() as count:
            target.forward(DraftTree(0, 0), cache.length, cache, 8)
        counts.append(count[0])
    return counts[1] - counts[0] - 4


@contextmanager
def counted() -> Iterator[list[int]]:
    """Operators that do something inside, views left out."""
    from torch.utils._python_dispatch import TorchDispatchMode

    count = [0]
    views = ("view", "expand", "transpose", "permute", "slice", "select", "unsqueeze", "squeeze", "split")
    nothing = (*views, "as_strided", "alias", "detach", "empty", "t.", "lift", "unbind", "reshape", "clone")

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = str(func).removeprefix("aten.")
            copies = name.startswith("clone") or not name.startswith(nothing)
            count[0] += copies
            return func(*args, **(kwargs or {}))

    with Counter():
        yield count


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def traffic(per_layer: int) -> str:
    """What a pass moves and computes; the same on every card."""
    rows = []
    for model in MODELS:
        for context in CONTEXTS:
            passes = [Pass(model, GPUS[0], context, n, per_layer * model.num_layers) for n in ROWS]
            cells = [f"{passes[0].weight_bytes / 1e9:.1f}", f"{passes[0].kv_bytes / 1e9:.1f}"]
            rows.append([model.name, f"{context:,}", *cells, *(f"{p.flops / 1e12:.2f}" for p in passes)])
    head = ["model", "context", "weights, GB", "KV, GB", *(f"TFLOP, {n} rows" for n in ROWS)]
    return table(head, rows)


def steps(per_layer: int) -> str:
    """Milliseconds of a step by rows."""
    rows = []
    for model, gpu, context in cases():
        passes = [Pass(model, gpu, context, n, per_layer * model.num_layers) for n in ROWS]
        name = f"{model.name}, {gpu.name}"
        rows.append(
            [name, f"{context:,}", f"{passes[0].ideal_ms:.1f}", *(f"{p.step_ms:.1f}" for p in passes)]
        )
    return table(["", "context", "limit", *(f"{n} rows" for n in ROWS)], rows)


def parts(per_layer: int) -> str:
    """Where the time of a step of 16 rows goes, at the longest context."""
    rows = []
    for model in MODELS:
        for gpu in GPUS:
            found = Pass(model, gpu, CONTEXTS[-1], 16, per_layer * model.num_layers).parts_ms()
            rows.append([f"{model.name}, {gpu.name}", *(f"{ms:.1f}" for ms in found.values())])
    return table(["", *found], rows)


def drafting_ms(model: Model, gpu: Gpu, by_pass: bool, per_layer: int) -> float:
    """Levels of heads, each with a wait and the lm_head for the draft vocabulary.

    The paper's have the whole lm_head, and a draft pass before them. That has no graph, so it takes at least
    as long as starting its kernels.
    """
    vocab = model.vocab if by_pass else DRAFT_VOCABULARY
    lm_head = model.hidden * vocab * BF16 / (gpu.gb_per_s * READ_SHARE) * 1e-6
    levels = HEAD_LEVELS * (lm_head + HOST_US / 2 * 1e-3)
    if not by_pass:
        return levels
    draft = Pass(model, gpu, DRAFT_CONTEXT, 2, per_layer * model.num_layers)
    starting = (per_layer + 6) * model.num_layers * LAUNCH_US * 1e-3
    return levels + max(starting, draft.step_ms - HOST_US * 1e-3)


def speeds(per_layer: int) -> str:
    """Tokens per second of AR (2 rows) and of swiftgen by tokens per step, and the factor.

    By heads a tree of 16 rows is verified, after a draft pass one of 64.
    """
    rows = []
    for model, gpu, context in cases():
        ar, small, large = (
            Pass(model, gpu, context, n, per_layer * model.num_layers).step_ms for n in (2, 16, 64)
        )
        cells = []
        for tokens, by_pass in [(n, False) for n in BY_HEADS] + [(n, True) for n in BY_PASS]:
            step = (large if by_pass else small) + drafting_ms(model, gpu, by_pass, per_layer)
            cells.append(f"{tokens / step * 1e3:.0f} ({tokens * ar / step:.1f}x)")
        rows.append([f"{model.name}, {gpu.name}", f"{context:,}", f"{1e3 / ar:.0f}", *cells])
    return table(["", "context", "AR", *(f"{n} a step" for n in (*BY_HEADS, *BY_PASS))], rows)


def cases() -> Iterator[tuple[Model, Gpu, int]]:
    for model in MODELS:
        for gpu in GPUS:
            for context in CONTEXTS:
                yield model, gpu, context


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of tables")
    options = parser.parse_args()
    per_layer = kernels_per_layer()
    if options.json:
        found = [
            {"model": m.name, "gpu": g.name, "context": c, "rows": n, "step_ms": p.step_ms, **p.parts_ms()}
            for m, g, c in cases()
            for n in ROWS
            if (p := Pass(m, g, c, n, per_layer * m.num_layers))
        ]
        print(json.dumps({"kernels_per_layer": per_layer, "steps": found}))
        return
    print(f"{per_layer} small kernels a layer\n")
    for make in (traffic, steps, parts, speeds):
        print(make(per_layer) + "\n")


if __name__ == "__main__":
    main()
