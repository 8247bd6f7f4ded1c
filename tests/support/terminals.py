"""Terminals that tests can read, and a clock that they set."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console

from swiftgen.decoding.decode import StepEvent
from swiftgen.display.panel import LivePanel, RunInfo

INFO = RunInfo("smollm2-135m", "book.txt", 20_000, "lossless (checked at start)")


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def step(
    text: str, token_ids: Sequence[int] = (1, 2, 3), sources: Sequence[str] = ("base", "ngram")
) -> StepEvent:
    return StepEvent(
        token_ids=tuple(token_ids),
        sources=tuple(sources),
        draft_depth=4,
        num_rows=8,
        context_tokens=2_051,
        kv_bytes=300 * 2**20,
        draft_s=0.1,
        verify_s=0.2,
        sample_s=0.1,
        text=text,
        stop_reason=None,
    )


def terminal(width: int, height: int) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def frame(panel: LivePanel, width: int) -> list[str]:
    """The lines of the panel as it stands on the terminal."""
    paper = Console(file=io.StringIO(), width=width)
    paper.print(panel._live.renderable)
    return written(paper).splitlines()
