"""Benchmark: the default preset against its own AR and against Hugging Face `generate`.

    python tests/tools/bench_decode.py --text novel.txt --prompts 64,2048,7900 --tokens 96 --repeats 3
    python tests/tools/bench_decode.py --ask "Write a novel." --ask "Write a manual." --tokens 1000 \\
        --no-generate
    python tests/tools/bench_decode.py --mix --set alphabet=any --drafts none,auto --no-generate
    python tests/tools/bench_decode.py --text novel.txt --prompts 1000,4000,16000,32000 \\
        --set long_context=yarn --no-generate --drafts none,auto

All get the same prompt, dtype and sampler (transformers has no penalty window, so its penalty sees the
whole context). Runs are interleaved, figures are medians; prefill and decoding are timed apart, and our own
runs read a prompt once. The rate that the measured memory bandwidth allows is printed beside. Ends with one
JSON line on stdout.
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from swiftgen.commands.process import load_engine
from swiftgen.engine import Engine
from swiftgen.forward.cache import FullCache
from swiftgen.forward.passes import PassOutput
from swiftgen.forward.target import Target
from swiftgen.settings.presets import load_preset, parse_override
from swiftgen.system.machine import read_gb_per_s


@dataclass(frozen=True)
class Timing:
    """One run; tokens_per_step is None for a decoder without steps."""

    prefill_s: float
    tokens_per_s: float
    token_ids: list[int]
    tokens_per_step: float | None = None


class ReadOnce:
    """Reads a prompt once and gives every later run a copy: reading takes minutes at 32K tokens."""

    def __init__(self, target: Target) -> None:
        self._prefill = target.prefill
        self._read: tuple[list[int], FullCache, PassOutput | None] = (
            [],
            FullCache(target.cache_shape, 1),
            None,
        )
        target.prefill = self.prefill  # type: ignore[method-assign]

    def prefill(
        self, token_ids: Sequence[int], cache: FullCache, on_progress: Callable[[int], None] | None = None
    ) -> PassOutput | None:
        """See `Target.prefill`."""
        num_tokens, (known_ids, known, output) = len(token_ids), self._read
        if known_ids != list(token_ids):
            output = self._prefill(token_ids, cache, on_progress)
            self._read = list(token_ids), cache, output
            return output
        cache.keys[:, :, :num_tokens] = known.keys[:, :, :num_tokens]
        cache.values[:, :, :num_tokens] = known.values[:, :, :num_tokens]
        cache.length = num_tokens
        return output


Run = Callable[[int, int], Timing]
"""A run of (tokens, seed)."""


class FirstToken:
    """A transformers streamer that notes when the prompt was done and the first token written."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, _: torch.Tensor) -> None:
        self.times_s.append(time.perf_counter())

    def end(self) -> None: ...


def time_engine(engine: Engine, draft: str, prompt_ids: list[int], num_tokens: int, seed: int) -> Timing:
    # One engine for all, since weights that lie elsewhere in memory can be faster or slower to read.
    engine.preset = engine.preset.model_copy(update={"draft": draft})
    begin = time.perf_counter()
    marks: list[tuple[float, int]] = []
    token_ids: list[int] = []
    for event in engine.stream(prompt_ids, num_tokens=num_tokens, seed=seed):
        token_ids += event.token_ids
        marks.append((time.perf_counter(), len(token_ids)))
    (first_s, first), (last_s, last) = marks[0], marks[-1]
    rate = (last - first) / (last_s - first_s)
    return Timing(first_s - begin, rate, token_ids, len(token_ids) / len(marks))


def time_generate(
    model: torch.nn.Module, engine: Engine, prompt_ids: list[int], num_tokens: int, seed: int
) -> Timing:
    preset = engine.preset
    torch.manual_seed(seed)
    clock = FirstToken()
    begin = time.perf_counter()
    output = model.generate(
        torch.tensor([prompt_ids]),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=True,
        temperature=preset.sampler.temperature,
        min_p=preset.sampler.min_p or None,
        top_k=0,
        repetition_penalty=preset.theta,
        streamer=clock,
        pad_token_id=0,
    )
    times_s = clock.times_s[1:]  # the first call is the prompt
    rate = (len(times_s) - 1) / (times_s[-1] - times_s[0])
    return Timing(times_s[0] - begin, rate, output[0, len(prompt_ids) :].tolist())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, help="a long text; prompts are its beginning, raw")
    parser.add_argument("--prompts", default="64,2048,7900", help="prompt lengths in tokens")
    parser.add_argument("--ask", action="append", default=[], help="a chat prompt; can be repeated")
    parser.add_argument("--mix", action="store_true", help="raw prompts of very different kinds")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3, help="each with a seed of its own")
    parser.add_argument("--drafts", default="none,auto,paper")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all runs")
    parser.add_argument("--no-generate", action="store_true", help="leave Hugging Face out")
    options = parser.parse_args()

    settings = dict(parse_override(text) for text in options.set)
    engine = load_engine(load_preset(None, settings))
    prompts = {ask: engine.encode(ask) for ask in options.ask}
    if options.text:
        text_ids = engine.tokenizer.encode(options.text.read_text(encoding="utf-8")[:200_000])
        prompts |= {n: text_ids[: int(n)] for n in options.prompts.split(",")}
    if options.mix:
        prompts |= {name: engine.tokenizer.encode(text) for name, text in mixed_texts().items()}
    reference = None
    if not options.no_generate:
        opened = engine.opened
        reference = AutoModelForCausalLM.from_pretrained(opened.folder, dtype=opened.dtype).eval()

    # One stretch of the positions for all lengths, and one model.
    engine.stretch_to = max(map(len, prompts.values())) + options.tokens
    engine.prepare(1, 1)
    ReadOnce(engine._prepared.target)
    rows = []
    for name, prompt_ids in prompts.items():
        runs: dict[str, Run] = {
            mode: functools.partial(time_engine, engine, mode, prompt_ids)
            for mode in options.drafts.split(",")
        }
        if reference is not None:
            runs["hf generate"] = functools.partial(time_generate, reference, engine, prompt_ids)
        rows += compare(name, len(prompt_ids), runs, options.tokens, options.repeats)
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=140).print(table)
    limit = read_gb_per_s() * 1e9 / engine.opened.weights_bytes(engine._backend.kernels)
    print(f"memory bandwidth allows {limit:.1f} tokens/s, if each token reads the weights once")
    machine = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "dtype": str(engine.opened.dtype),
        "memory_limit_tokens_per_s": round(limit, 1),
        "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
    }
    print(json.dumps({"machine": machine, "tokens": options.tokens, "rows": rows}))


def mixed_texts() -> dict[str, str]:
    """Beginnings that ask for very different texts."""
    items = ("apples", "bread", "milk", "eggs", "tea", "rice", "salt", "soap")
    rows = "".join(f"{day},{day * 37 % 90 + 5},{day * 53 % 70 / 10},open\n" for day in range(1, 60))
    return {
        "prose": "The sea was calm when the lighthouse keeper found the map. " * 3,
        "code": Path(argparse.__file__).read_text(encoding="utf-8")[3000:9000],
        "table": "day,visitors,hours,state\n" + rows,
        "list": "".join(f"{n}. Buy {items[n % len(items)]}.\n" for n in range(1, 40)),
        "French": "Le vieux gardien du phare regardait la mer, comme chaque soir, et pensait à sa sœur, "
        "qui vivait de l'autre côté de la baie. Il ne lui avait pas écrit depuis l'hiver. ",
    }


def compare(
    name: str, prompt_tokens: int, runs: dict[str, Run], num_tokens: int, repeats: int
) -> list[dict[str, object]]:
    """Interleave the runs of one prompt; the first is what the texts of the others are compared with."""
    reading_s = {mode: run(32, 0).prefill_s for mode, run in runs.items()}  # warm-up, only reading counts
    results: dict[str, list[Timing]] = {mode: [] for mode in runs}
    for seed in range(1, repeats + 1):
        for mode, run in runs.items():
            results[mode].append(run(num_tokens, seed))
            print(name, seed, mode, f"{results[mode][-1].tokens_per_s:.2f} tokens/s", file=sys.stderr)
    first = next(iter(results.values()))
    return [
        row(name, prompt_tokens, mode, timings, first, reading_s[mode]) for mode, timings in results.items()
    ]


def row(
    name: str,
    prompt_tokens: int,
    mode: str,
    timings: Sequence[Timing],
    first: Sequence[Timing],
    reading_s: float,
) -> dict[str, object]:
    rates = [timing.tokens_per_s for timing in timings]
    steps = [timing.tokens_per_step for timing in timings if timing.tokens_per_step]
    ratios = [mine.tokens_per_s / theirs.tokens_per_s for mine, theirs in zip(timings, first, strict=True)]
    same = [mine.token_ids == theirs.token_ids for mine, theirs in zip(timings, first, strict=True)]
    return {
        "prompt": name,
        "prompt_tokens": prompt_tokens,
        "run": mode,
        "prefill_s": round(reading_s, 2),
        "tokens_per_s": round(statistics.median(rates), 2),
        "min": round(min(rates), 2),
        "max": round(max(rates), 2),
        "tokens_per_step": round(statistics.median(steps), 2) if steps else None,
        "ratio": round(statistics.median(ratios), 2),
        "same_text": None if mode == "hf generate" else all(same),
    }


if __name__ == "__main__":
    main()
