"""Contenders: everything that can write the document, each behind the same small interface.

swiftgen's own ways are engines under other settings, and share the weights in memory where they can. Programs
of others are in `foreign`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swiftgen.commands.process import load_engine
from swiftgen.decoding.decode import StepEvent
from swiftgen.engine import Engine
from swiftgen.settings.schema import Preset, in_memory
from swiftgen.system.errors import SwiftgenError

OnEvent = Callable[[StepEvent], object]
Runner = Callable[[Sequence[int], int, int, OnEvent], None]
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
    run: Runner
    prompt_ids: Sequence[int]
    reference: str
    draws_like_ar: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Way:
    """Settings under which swiftgen itself is a contender.

    Args:
        name, description, reference: See `Contender`.
        prompt_tokens: Length to cut the prompt to; None leaves it.
    """

    name: str
    description: str
    preset: Preset
    reference: str
    prompt_tokens: int | None = None


class OwnEngine:
    """swiftgen's engine, one in memory at a time: ways that need another one come after it has gone.

    Args:
        prompt: What is continued; settings say how it is encoded.
        num_tokens: To write.
        on_load: Called with a preset before its model is loaded.

    Attributes:
        num_prompt_tokens: Of the prompt, the most under any of the settings loaded for.
    """

    def __init__(self, prompt: str, num_tokens: int, on_load: Callable[[Preset], object]) -> None:
        self._prompt, self._num_tokens, self._on_load = prompt, num_tokens, on_load
        self._engine: Engine | None = None
        self._ways: dict[str, Engine] = {}
        self.num_prompt_tokens = 0

    @property
    def engine(self) -> Engine:
        """The one that is in memory; call `load` first."""
        assert self._engine is not None
        return self._engine

    def load(self, presets: Sequence[Preset]) -> None:
        """Be ready for settings that share one engine; contenders made before cannot run any more.

        Raises:
            SwiftgenError: see `Engine.prepare` and `Engine.encode`.
        """
        self._ways = {}
        if self._engine is None or in_memory(self._engine.preset) != in_memory(presets[0]):
            self._engine = None
            gc.collect()  # the parts of a model refer to each other
            self._on_load(presets[0])
            self._engine = load_engine(presets[0])
        engine = self._engine
        self.num_prompt_tokens = max(len(engine.under(preset).encode(self._prompt)) for preset in presets)
        # What is shorter, such as a warm-up, runs on the same positions and loads no model for its own.
        engine.stretch_to = self.num_prompt_tokens + self._num_tokens
        engine.prepare(self.num_prompt_tokens, self._num_tokens)

    def contender(self, way: Way) -> Contender:
        """A way as a contender.

        Raises:
            SwiftgenError: it drafts by heads and has none, or the prompt is shorter than it is to be.
        """
        if way.preset.lacks_heads:
            raise SwiftgenError("the preset has no draft heads", "train some with `swiftgen train-heads`")
        self._ways[way.name] = engine = self.engine.under(way.preset)
        prompt_ids = engine.encode(self._prompt)
        if way.prompt_tokens and way.prompt_tokens > len(prompt_ids):
            raise SwiftgenError(
                f"--sweep prompt={way.prompt_tokens}: the prompt has {len(prompt_ids):,} tokens",
                "give a longer one with --prompt-file",
            )

        def run(prompt_ids: Sequence[int], num_tokens: int, seed: int, on_event: OnEvent) -> None:
            for event in self._ways[way.name].stream(prompt_ids, num_tokens=num_tokens, seed=seed):
                on_event(event)

        is_exact = engine.is_lossless
        notes = () if is_exact else (f"decoding is {engine.exactness} on this machine",)
        prompt_ids = prompt_ids[: way.prompt_tokens]
        return Contender(way.name, way.description, run, prompt_ids, way.reference, is_exact, notes)
