"""Benchmark: the default preset against its own AR and against Hugging Face `generate`.

    python tests/bench_decode.py --text novel.txt --prompts 64,2048,7900 --tokens 96 --repeats 3

All get the same prompt, dtype and sampler (transformers has no penalty window, so its penalty sees the
whole context). Runs are interleaved, figures are medians; prefill and decoding are timed apart. Ends
with one JSON line on stdout.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from swiftgen.engine import Engine, load
from swiftgen.models import open_model
from swiftgen.presets import load_preset

Timing = tuple[float, float, list[int]]
"""Prefill seconds, decoding tokens/s, token ids."""


class FirstToken:
    """A transformers streamer that notes when the prompt was done and the first token written."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, _: torch.Tensor) -> None:
        self.times_s.append(time.perf_counter())

    def end(self) -> None: ...


def time_engine(engine: Engine, prompt_ids: list[int], num_tokens: int, seed: int) -> Timing:
    begin = time.perf_counter()
    marks: list[tuple[float, int]] = []
    token_ids: list[int] = []
    for event in engine.stream(prompt_ids, num_tokens=num_tokens, seed=seed):
        token_ids += event.token_ids
        marks.append((time.perf_counter(), len(token_ids)))
    (first_s, first), (last_s, last) = marks[0], marks[-1]
    return first_s - begin, (last - first) / (last_s - first_s), token_ids


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
    return times_s[0] - begin, rate, output[0, len(prompt_ids) :].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="a long text; prompts are its beginning")
    parser.add_argument("--prompts", default="64,2048,7900", help="prompt lengths in tokens")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--drafts", default="none,auto,paper")
    options = parser.parse_args()

    modes = options.drafts.split(",")
    engines = {mode: load(None, {"draft": mode, "chat": False}) for mode in modes}
    opened = open_model(load_preset(None))
    reference = AutoModelForCausalLM.from_pretrained(opened.folder, dtype=opened.dtype).eval()
    text_ids = engines[modes[0]].tokenizer.encode(options.text.read_text(encoding="utf-8")[:200_000])

    rows = []
    for num_prompt in map(int, options.prompts.split(",")):
        prompt_ids = text_ids[:num_prompt]
        runs: dict[str, Callable[[int], Timing]] = {
            "hf generate": lambda seed, p=prompt_ids: time_generate(
                reference, engines[modes[0]], p, options.tokens, seed
            )
        }
        for mode, engine in engines.items():
            runs[mode] = lambda seed, e=engine, p=prompt_ids: time_engine(e, p, options.tokens, seed)
        for run in runs.values():  # warm-up, not counted
            run(0)
        results: dict[str, list[Timing]] = {name: [] for name in runs}
        for seed in range(1, options.repeats + 1):
            for name, run in runs.items():
                results[name].append(run(seed))
                print(num_prompt, seed, name, f"{results[name][-1][1]:.2f} tokens/s", file=sys.stderr)
        expected = [ids for _, _, ids in results[modes[0]]]
        for name, timings in results.items():
            rows.append(
                {
                    "prompt_tokens": num_prompt,
                    "run": name,
                    "prefill_s": round(statistics.median(t[0] for t in timings), 2),
                    "tokens_per_s": round(statistics.median(t[1] for t in timings), 2),
                    "min": round(min(t[1] for t in timings), 2),
                    "max": round(max(t[1] for t in timings), 2),
                    "same_text_as_ar": None if name == "hf generate" else [t[2] for t in timings] == expected,
                }
            )
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    machine = {"torch": torch.__version__, "threads": torch.get_num_threads(), "dtype": str(opened.dtype)}
    print(json.dumps({"machine": machine, "tokens": options.tokens, "rows": rows}))


if __name__ == "__main__":
    main()
