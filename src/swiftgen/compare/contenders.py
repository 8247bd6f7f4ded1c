"""Contenders: everything that can write the document, each behind the same small interface.

swiftgen's own ways are one engine under other settings, so they share the weights in memory. Programs of
others are in `foreign`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swiftgen.decoding.decode import StepEvent
from swiftgen.engine import Engine
from swiftgen.settings.presets import Preset

OnEvent = Callable[[StepEvent], object]
Run = Callable[[Sequence[int], int, int, OnEvent], None]
"""Write (prompt ids, number of tokens, seed), showing every step; all of it counts as one run."""

SUBJECT, AR = "swiftgen", "ar"

OWN_WAYS: dict[str, tuple[str, Mapping[str, Any]]] = {
    AR: ("plain decoding, swiftgen's own engine", {"draft": "none"}),
    "paper": ("the paper's fixed plan: draft pass, heads, k n-grams, one tree shape", {"draft": "paper"}),
    "medusa": ("draft heads on the verify pass's state, no draft pass", {"draft": "heads"}),
    "triforce": ("draft passes with the partial KV cache, no heads", {"draft": "self", "heads": None}),
}


@dataclass(frozen=True)
class Contender:
    """One way to write the document.

    Args:
        name: Short, for tables.
        description: What it is, in one line.
        run: Writes it.
        prompt_ids: What it continues.
        reference: Name of the contender that speed-ups are measured against; empty for that one itself.
        draws_like_ar: Whether it samples with swiftgen's keyed noise, so that its text has to be that of AR.
        notes: What a reader must know before comparing figures.
    """

    name: str
    description: str
    run: Run
    prompt_ids: Sequence[int]
    reference: str
    draws_like_ar: bool
    notes: tuple[str, ...] = ()


def own_run(engine: Engine, preset: Preset) -> Run:
    """The engine's model under the settings of `preset`; the engine is prepared."""
    way = engine.under(preset)

    def run(prompt_ids: Sequence[int], num_tokens: int, seed: int, on_event: OnEvent) -> None:
        for event in way.stream(prompt_ids, num_tokens=num_tokens, seed=seed):
            on_event(event)

    return run
