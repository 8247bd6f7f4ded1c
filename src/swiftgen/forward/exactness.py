"""The exactness check: which pass sizes give a row bit for bit the same result.

Lossless decoding needs a row that does not depend on the other rows, on its place among them, or on how
many there are. Kernels decide that, so it is measured on the real model: the same two tokens are computed
one a pass, as AR decoding does, and as a branch among shuffled wrong siblings, at every size, and compared
to the last bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from swiftgen.forward.cache import BLOCK_TOKENS, FullCache
from swiftgen.forward.target import Target
from swiftgen.forward.tree import DraftTree
from swiftgen.system import ranks
from swiftgen.system.cache_folder import cache_folder
from swiftgen.system.storage import write_synced
from swiftgen.system.version import __version__

CANDIDATE_SIZES = (2, 4, 8, 16, 32, 64)
"""One row alone is left out: matrix-vector kernels add in an order of their own, and it costs the same."""
NATIVE_SIZES = (1, 2, 3, 4, 5, 8, 16, 32, 64)
"""Of passes that are native throughout, whose cost grows with every row."""
_NUM_PROBES = 16
_NUM_ALONE = 3
_CONTEXT_TOKENS = 9 * BLOCK_TOKENS + 37  # long enough for a split prefix, with a tail
_PREFERRED_FIXED_SIZE = 8
_NUM_TIMED = 3
_FOLDER = "exactness"


@dataclass(frozen=True)
class Exactness:
    """What the check found.

    Args:
        pass_sizes: Sizes a pass may use, ascending.
        lossless: Whether rows at these sizes agree bit for bit.
        pass_seconds: What a pass of each size took, for the planner to begin with.
    """

    pass_sizes: tuple[int, ...]
    lossless: bool
    pass_seconds: tuple[float, ...]

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.pass_sizes))
        if not self.lossless:
            return f"lossless up to rounding (no pass size reproduces a row bit for bit; using {sizes} rows)"
        return f"lossless (passes of {sizes} rows agree bit for bit)"


def known_exactness(target: Target, fingerprint: str) -> Exactness:
    """The result for this model and machine: from the cache folder, or measured now and kept there.

    Args:
        target: as loaded.
        fingerprint: of its weights.
    """
    if kept := ranks.of_leader(kept_exactness(target.arithmetic, fingerprint)):
        return kept
    found = choose_pass_sizes(target)
    if ranks.rank():
        return found
    file = machine_file(_FOLDER, target.arithmetic, fingerprint)
    with contextlib.suppress(OSError):  # a read-only cache only costs the time to measure again
        file.parent.mkdir(parents=True, exist_ok=True)
        write_synced(file, json.dumps(asdict(found)).encode())
    return found


def kept_exactness(arithmetic: Mapping[str, object], fingerprint: str) -> Exactness | None:
    """The result in the cache folder; None if it is not measured yet.

    Args:
        arithmetic: that of the target, see `arithmetic`.
        fingerprint: of its weights.
    """
    file = machine_file(_FOLDER, arithmetic, fingerprint)
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        return Exactness(
            tuple(map(int, kept["pass_sizes"])),
            bool(kept["lossless"]),
            tuple(map(float, kept["pass_seconds"])),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not measured yet, or the file is damaged


def machine_file(folder: str, arithmetic: Mapping[str, object], fingerprint: str, *more: object) -> Path:
    """Where the cache folder keeps what was measured of a model on this machine.

    Args:
        folder: For what was measured.
        more: What it depends on besides.
    """
    described = json.dumps(
        [__version__, NATIVE_SIZES, CANDIDATE_SIZES, fingerprint, arithmetic, _machine(), *more],
        sort_keys=True,
    )
    name = hashlib.sha256(described.encode()).hexdigest()[:32]
    return cache_folder() / folder / f"{name}.json"


def _machine() -> list[object]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return [platform.node(), device, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]


def candidate_sizes(target: Target) -> tuple[int, ...]:
    """Which sizes are tried, ascending."""
    return NATIVE_SIZES if target.is_native else CANDIDATE_SIZES


def choose_pass_sizes(target: Target) -> Exactness:
    """Measure which sizes agree; the largest set of them is the answer.

    A size counts only if it agrees with itself whatever else is in the pass. The passes, counted in
    docs/design.md, are over a cache filled with noise. Does not change the target.
    """
    cache = _noise_cache(target)
    results = {size: _results(target, size, cache) for size in candidate_sizes(target)}
    sound = [size for size, found in results.items() if all(_same(a, b) for a, b in combinations(found, 2))]
    groups = [[b for b in sound if _same(results[a][1], results[b][1])] for a in sound]
    best = max(groups, key=lambda sizes: (len(sizes), _PREFERRED_FIXED_SIZE in sizes), default=[])
    sizes = tuple(best) or (_PREFERRED_FIXED_SIZE,)
    return Exactness(sizes, bool(best), tuple(_pass_seconds(target, size, cache) for size in sizes))


def _pass_seconds(target: Target, size: int, cache: FullCache) -> float:
    """The shortest of a few passes; anything longer is the doing of other programs."""
    seconds = []
    for _ in range(_NUM_TIMED):
        begin = time.perf_counter()
        # Reading a value waits for the device.
        target.forward(DraftTree(0, 0), cache.length, cache, size).logits()[0, 0].item()
        seconds.append(time.perf_counter() - begin)
    return ranks.of_leader(min(seconds))


Results = dict[int, list[Tensor]]
"""By token: hidden state, logits, key and value of the row that carries it, after the same text."""


def _same(a: Results, b: Results) -> bool:
    return ranks.on_all(
        all(
            torch.equal(x, y)
            for token in a.keys() & b.keys()
            for x, y in zip(a[token], b[token], strict=True)
        )
    )


def _results(target: Target, size: int, cache: FullCache) -> tuple[Results, Results, Results]:
    """The probe tokens after one root, at this size: a few one a pass, all of them in two arrangements."""
    vocab_size = target.config.vocab_size
    probes = [(7 * i + 3) % vocab_size for i in range(_NUM_PROBES)]
    alone = _alone(target, probes[:_NUM_ALONE], size, cache)
    if size == 1:
        return alone, alone, alone
    first: Results = {}
    second: Results = {}
    for begin in range(0, len(probes), size - 1):
        first |= _siblings(target, probes[begin : begin + size - 1], size, cache)
    crowd = [*range(max(0, vocab_size - size // 2), vocab_size), *reversed(probes)]
    for begin in range(0, len(crowd), size - 1):
        second |= _siblings(target, crowd[begin : begin + size - 1], size, cache)
    return alone, first, second


def _alone(target: Target, tokens: Sequence[int], size: int, cache: FullCache) -> Results:
    """As AR decoding does it: the root is committed, and each token is the root of a pass of its own."""
    length = cache.length
    target.forward(DraftTree(0, max_depth=0), length, cache, size)
    cache.commit([0])
    results = {}
    for token in tokens:
        output = target.forward(DraftTree(token, max_depth=0), cache.length, cache, size)
        results[token] = _row(output.logits(), output.hidden, cache, 0)
    cache.length = length
    return results


def _siblings(target: Target, tokens: Sequence[int], size: int, cache: FullCache) -> Results:
    tree = DraftTree(0, max_depth=1)
    nodes = {token: tree.add(0, token, "probe") for token in tokens}
    output = target.forward(tree, cache.length, cache, size)
    logits = output.logits()
    results = {}
    for token, node in nodes.items():
        assert node is not None
        results[token] = _row(logits, output.hidden, cache, node)
    return results


def _row(logits: Tensor, hidden: Tensor, cache: FullCache, row: int) -> list[Tensor]:
    slot = cache.length + row
    own = (part.clone() for store in cache.stores.values() for part in store.between(slot, slot + 1))
    return [hidden[row], logits[row], *own]


def _noise_cache(target: Target) -> FullCache:
    shape = target.cache_shape
    longest = max((window for window in shape.windows if window), default=0)
    num_tokens = _CONTEXT_TOKENS + longest - longest % BLOCK_TOKENS  # beyond every sliding window
    cache = FullCache(shape, num_tokens + 1 + CANDIDATE_SIZES[-1])
    generator = torch.Generator().manual_seed(0)
    cache.length = num_tokens
    for window, store in cache.stores.items():
        cache.view(1, 0, window)  # moves a window to the end of the text
        for tensor in store.between(store.begin, num_tokens):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache
