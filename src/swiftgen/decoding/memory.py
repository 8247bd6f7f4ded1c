"""What runs on this machine have learnt about drafting, for those to come: kept in the cache folder."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swiftgen.decoding.decode import StepEvent
from swiftgen.decoding.estimates import Estimates, Known
from swiftgen.decoding.ready import Ready
from swiftgen.forward.exactness import machine_file
from swiftgen.settings.schema import Preset
from swiftgen.system import ranks
from swiftgen.system.storage import replace_file

FOLDER = "drafting"
_LARGEST_BYTES = 2**20


def memory_file(ready: Ready, preset: Preset) -> Path:
    """Where it is kept for a model, this machine, and the settings that decide what a draft is worth."""
    cache = preset.kv_budget, preset.sink, preset.refresh
    settings = [preset.heads, *cache, preset.sampler.model_dump(), preset.theta]
    return machine_file(FOLDER, ready.target.arithmetic, ready.loaded.fingerprint, settings)


def recalled(file: Path, ready: Ready) -> Estimates:
    """Estimates as earlier runs have left them."""
    exactness = ready.exactness
    return Estimates(exactness.pass_sizes, exactness.pass_seconds, ranks.of_leader(_read(file)))


def remembering(events: Iterator[StepEvent], estimates: Estimates, file: Path) -> Iterator[StepEvent]:
    """The steps of a run; what was learnt is written when it ends, however it does."""
    try:
        yield from events
    finally:
        if not ranks.rank():
            _write(file, estimates.known())


def _read(file: Path) -> Known:
    """What a file holds; nothing if it is missing, damaged or of another kind."""
    try:
        if file.stat().st_size > _LARGEST_BYTES:
            return Known()
        kept = json.loads(file.read_text(encoding="utf-8"))
        costs = {
            int(length_class): {str(name): _positive(seconds) for name, seconds in of_class.items()}
            for length_class, of_class in kept["costs"].items()
        }
        acceptance = {_key(name): _share(chance) for name, chance in kept["acceptance"].items()}
        hits = {str(source): _share(hit) for source, hit in kept["hits"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Known()
    return Known(costs, acceptance, hits)


def _write(file: Path, known: Known) -> None:
    plain = {
        "costs": known.costs,
        "acceptance": {" ".join(map(str, key)): round(chance, 4) for key, chance in known.acceptance.items()},
        "hits": known.hits,
    }
    with contextlib.suppress(OSError):  # without it the next run learns it again
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, lambda path: path.write_text(json.dumps(plain), encoding="utf-8"))


def _key(name: str) -> tuple[str, int, int]:
    source, depth, grade = name.split()
    return source, int(depth), int(grade)


def _positive(value: Any) -> float:
    if not 0 < float(value) < math.inf:
        raise ValueError(f"no time: {value}")
    return float(value)


def _share(value: Any) -> float:
    if not 0 <= float(value) <= 1:
        raise ValueError(f"no share: {value}")
    return float(value)
