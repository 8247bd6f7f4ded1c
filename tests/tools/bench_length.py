"""Does a step cost more the longer the document is? Time and memory at several lengths of one text.

    python tests/tools/bench_length.py --draft paper
    python tests/tools/bench_length.py --draft lookup --at 5000,50000,100000
    python tests/tools/bench_length.py --upkeep --at 5000,50000,200000

A random model of two small layers writes a document as `swiftgen write` does: run folder, figures and
panel included. With --upkeep there is no model: made-up tokens go through everything that follows the text.
Times are of the processor, in microseconds, means of the steps before each length, without what is below
them in the table; memory is that of the process. Only attention and the KV cache may grow. Ends with one JSON
line on stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # so that the time of the main thread is all there is

sys.path.append(str(Path(__file__).parents[1]))  # for support

import psutil
from rich.console import Console

from support.documents import manifest
from support.model_files import save_model
from support.upkeep import STEP_TOKENS, W, made_up_text, upkeep_parts
from swiftgen.commands.process import load_engine
from swiftgen.decoding.drafters.lookup import LookupDrafter
from swiftgen.decoding.drafters.ngram import NgramDrafter
from swiftgen.decoding.history import History
from swiftgen.decoding.planner import Planner
from swiftgen.decoding.sampling import Sampler
from swiftgen.display.panel import LivePanel, RunInfo
from swiftgen.document.document import Document
from swiftgen.figures.distinct import DistinctN
from swiftgen.figures.loops import LoopDetector
from swiftgen.figures.metrics import RunMetrics
from swiftgen.forward.native_pass import NativePass
from swiftgen.forward.partial_cache import PartialCache
from swiftgen.forward.target import Target
from swiftgen.settings.schema import Preset
from swiftgen.text.stream import TextStream

WINDOW_STEPS = 500
Step = tuple[dict[str, float], int, int]
"""Seconds by part, tokens written, rows of the verify pass."""


@dataclass
class Clock:
    """Processor time of the main thread by part; a part that is called by another is not counted there."""

    spent_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _inner_s: list[float] = field(default_factory=lambda: [0.0])

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, timed."""

        def wrapper(*args: Any, **options: Any) -> Any:
            self._inner_s.append(0.0)
            begin_s = time.thread_time()
            try:
                return call(*args, **options)
            finally:
                total_s = time.thread_time() - begin_s
                self.spent_s[part] += total_s - self._inner_s.pop()
                self._inner_s[-1] += total_s

        return wrapper

    def watch(self, part: str, owner: Any, *names: str) -> None:
        """Times functions of a class or module from now on."""
        for name in names:
            setattr(owner, name, self.timed(part, getattr(owner, name)))


def upkeep(lengths: Sequence[int]) -> Iterator[dict[str, float]]:
    """Microseconds a step by part, and the memory, at each length."""
    text = made_up_text(lengths[-1])
    parts, clock, done = upkeep_parts(len(text)), Clock(), 0
    steps = {name: clock.timed(name, follow) for name, follow in parts.items()}
    for length in lengths:
        for begin in range(done, length, STEP_TOKENS):
            if begin + STEP_TOKENS * WINDOW_STEPS >= length > begin + STEP_TOKENS * (WINDOW_STEPS - 1):
                clock.spent_s.clear()
            for follow in steps.values():
                follow(text[begin : begin + STEP_TOKENS])
        done = length
        yield {part: 1e6 * spent_s / WINDOW_STEPS for part, spent_s in clock.spent_s.items()} | memory()


def memory() -> dict[str, float]:
    return {"MB": psutil.Process().memory_info().rss / 1e6}


def document(lengths: Sequence[int], draft: str, folder: Path) -> Iterator[dict[str, float]]:
    """The same for a document of a random model."""
    clock = Clock()
    watch_all(clock)
    engine = load_engine(tiny_preset(folder, draft, lengths[-1]))
    prompt_ids = engine.encode("hello world ")
    engine.prepare(len(prompt_ids), lengths[-1])
    metrics, waiting, done = RunMetrics(), list(lengths), 0
    steps: list[Step] = []
    record = manifest(num_prompt_tokens=len(prompt_ids))
    screen = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    panel = LivePanel(Console(file=screen, force_terminal=True, width=100, height=30))
    panel.start(RunInfo("tiny", "book.txt", lengths[-1], engine.exactness))
    with screen, Document.create(folder / "book.txt", record, prompt_ids, metrics=metrics) as book:
        for event in engine.stream(prompt_ids, num_tokens=lengths[-1], seed=1):
            metrics.observe(event)
            book.append(event)
            panel.step(event, metrics)
            done += len(event.token_ids)
            steps.append((dict(clock.spent_s), len(event.token_ids), event.num_rows))
            del steps[:-WINDOW_STEPS]
            clock.spent_s.clear()
            if done >= waiting[0]:
                waiting.pop(0)
                yield means(steps) | {"KV cache MB": event.kv_bytes / 1e6} | memory()
            if not waiting:
                break
        panel.close()


def watch_all(clock: Clock) -> None:
    clock.watch("draft", Planner, "draft")
    clock.watch("verify", Target, "forward", "logits")
    clock.watch("attention", NativePass, "attend", "run_layers")
    clock.watch("sampling", Sampler, "pick", "rank")
    clock.watch("history", History, "extend", "last", "windows")
    clock.watch("plan", Planner, "observe")
    clock.watch("lookup", LookupDrafter, "observe", "propose")
    clock.watch("n-grams", NgramDrafter, "observe", "propose")
    clock.watch("partial cache", PartialCache, "update")
    clock.watch("partial cache: selection", PartialCache, "select")
    clock.watch("text", TextStream, "push")
    clock.watch("distinct", DistinctN, "update")
    clock.watch("loops", LoopDetector, "update")
    clock.watch("figures", RunMetrics, "observe", "snapshot")
    clock.watch("document", Document, "append")
    clock.watch("panel", LivePanel, "step")


def means(steps: Sequence[Step]) -> dict[str, float]:
    """Of the parts in microseconds, of the tokens and of the rows."""
    parts = sorted({part for spent_s, _, _ in steps for part in spent_s})
    found = {
        part: 1e6 * sum(spent_s.get(part, 0.0) for spent_s, _, _ in steps) / len(steps) for part in parts
    }
    found["tokens"] = sum(num_tokens for _, num_tokens, _ in steps) / len(steps)
    found["rows"] = sum(num_rows for _, _, num_rows in steps) / len(steps)
    return found


def tiny_preset(folder: Path, draft: str, num_tokens: int) -> Preset:
    save_model(folder / "tiny", initializer_range=0.25, max_position_embeddings=num_tokens + 1_024)
    return Preset.model_validate(
        {
            "model": {"source": str(folder / "tiny"), "dtype": "float32", "device": "cpu"},
            "draft": draft,
            "theta": 1.1,
            "W": W,
            "kv_budget": 1_024,
            "sampler": {"temperature": 0.9, "min_p": 0.02},
        }
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--at", default="5000,50000", help="lengths in tokens, ascending")
    parser.add_argument("--draft", default="paper", help="how to draft")
    parser.add_argument("--upkeep", action="store_true", help="without a model")
    options = parser.parse_args()
    lengths = [int(length) for length in options.at.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        rows = upkeep(lengths) if options.upkeep else document(lengths, options.draft, Path(folder))
        found = []
        for length, row in zip(lengths, rows, strict=True):
            print(f"{length:>9,} tokens", file=sys.stderr, flush=True)
            found.append(row)
    for part in found[0]:
        figures = "".join(f"{row.get(part, 0.0):>14,.1f}" for row in found)
        print(f"{part:<26}{figures}", file=sys.stderr)
    print(
        json.dumps({"draft": None if options.upkeep else options.draft, "lengths": lengths, "found": found})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
