"""Loops in real texts: none is to be found in them, and those that are planted in time.

    python tests/tools/bench_loops.py novels/*.txt

The texts are read with the tokenizer of the default preset, each as one document. For every text and every
period a cycle is cut out of it and repeated at a place in it; it counts how many periods later that is found.
Ends with one JSON line on stdout; exit code 1 if a loop was found that is none, or one too late.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from swiftgen.figures.loops import MIN_REPEATED_TOKENS, Loop, LoopDetector
from swiftgen.models.loading import open_model
from swiftgen.settings.presets import load_preset

PERIODS = (1, 7, 300, 3_000)
LATEST_REPEATED_TOKENS = 54  # of a loop with a short period: noticed before


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--plants", type=int, default=20, help="of each period in each text")
    options = parser.parse_args()
    tokenizer = open_model(load_preset()).tokenizer
    rng = random.Random(0)
    num_tokens, cpu_s, loops = 0, 0.0, []
    latest: dict[int, list[float]] = {period: [] for period in PERIODS}
    num_planted = num_late = 0
    for path in options.texts:
        tokens = tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False)
        detector, begin_s = LoopDetector(), time.process_time()
        for begin in range(0, len(tokens), 4):
            if loop := detector.update(tokens[begin : begin + 4]):
                loops.append(f"{path.name}: {loop}")
        cpu_s += time.process_time() - begin_s
        num_tokens += len(tokens)
        for period in PERIODS * options.plants:
            found = planted(tokens, period, rng)
            num_planted += 1
            if found is None or found > latest_periods(period):
                num_late += 1
            else:
                latest[period].append(found)
        print(f"{path.name}: {len(tokens):,} tokens, {len(loops)} loops so far", file=sys.stderr, flush=True)
    result = {
        "num_tokens": num_tokens,
        "loops": loops,
        "us_per_token": round(1e6 * cpu_s / num_tokens, 2),
        "num_planted": num_planted,
        "num_late": num_late,
        "found_after_periods": {period: round(max(found), 2) for period, found in latest.items()},
        "found_after_tokens": {period: round(max(found) * period) for period, found in latest.items()},
    }
    print(json.dumps(result))
    return 1 if loops or num_late else 0


def latest_periods(period: int) -> float:
    """How long a loop may be when it is noticed."""
    return max(2.5, 1 + LATEST_REPEATED_TOKENS / period)


def planted(tokens: Sequence[int], period: int, rng: random.Random) -> float | None:
    """Periods from the beginning of a planted loop until it was found; None if another was found, or none."""
    start = rng.randrange(period, min(20_000, len(tokens) - 2 * period))
    source = rng.randrange(len(tokens) - period)
    cycle = list(tokens[source : source + period])
    detector = LoopDetector()
    detector.update(tokens[:start])
    for place in range(3 * period + 2 * MIN_REPEATED_TOKENS):
        if loop := detector.update([cycle[place % period]]):
            return _periods_since_start(loop, start, place, period)
    return None


def _periods_since_start(loop: Loop, start: int, place: int, period: int) -> float | None:
    # A cycle may repeat itself, and the text before may happen to end as the cycle does.
    if period % loop.period or loop.start > start:
        return None
    return (place + 1) / period


if __name__ == "__main__":
    sys.exit(main())
