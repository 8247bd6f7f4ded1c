"""What a person sees on stderr while a document is written: live panel, plain lines, or nothing.

The three share one small interface, `Reporter`. None of them touches stdout, which is the text's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from rich.box import HORIZONTALS
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from swiftgen.display.wording import (
    TextTail,
    count,
    duration,
    figure_rows,
    harmless,
    loop_words,
    progress_line,
    summary_rows,
)
from swiftgen.figures.loops import Loop
from swiftgen.figures.metrics import MetricsSnapshot, RunMetrics

if TYPE_CHECKING:
    from swiftgen.decoding.decode import StepEvent

REFRESH_INTERVAL_S = 1 / 8
LINE_INTERVAL_S = 10.0

_NUM_TEXT_LINES = 6
_NUM_OTHER_LINES = 12  # of the panel, and one for the prompt of the shell
_LABEL_WIDTH = 12

Display = Literal["panel", "lines", "summary", "quiet"]


@dataclass(frozen=True)
class RunInfo:
    """What is being written, for the display."""

    preset: str
    output: str  # a file name, or "stdout"
    num_tokens: int  # planned
    exactness: str  # one line: how far the text equals that of plain decoding
    num_written: int = 0  # tokens that are there already, of a run that is continued


class Reporter(Protocol):
    """Shows a run. Calls come in this order; `close` may come at any time, and twice."""

    def start(self, info: RunInfo) -> None:
        """The model is loaded; the prompt comes next, and what is written already."""

    def prefill(self, done_tokens: int, total_tokens: int) -> None:
        """Part of the prompt, or of what is written already, is read."""

    def step(self, event: StepEvent, metrics: RunMetrics) -> None:
        """One step is decoded, and observed by `metrics`."""

    def finish(self, snapshot: MetricsSnapshot, stop_reason: str) -> None:
        """The run has ended; shows the summary."""

    def close(self) -> None:
        """Leaves the terminal as it was, so that an error can be printed."""


def make_reporter(display: Display, console: Console | None = None) -> Reporter:
    """The reporter of a kind.

    Args:
        display: "panel" for a terminal; "lines" for a log: one every 10 s; "summary": only the
            table at the end; "quiet": nothing.
        console: where to; stderr by default.
    """
    console = console or Console(stderr=True)
    if display == "panel":
        return LivePanel(console)
    if display == "quiet":
        return QuietReporter()
    return LinePrinter(console, every_s=LINE_INTERVAL_S if display == "lines" else None)


class QuietReporter:
    """Shows nothing."""

    def start(self, info: RunInfo) -> None: ...

    def prefill(self, done_tokens: int, total_tokens: int) -> None: ...

    def step(self, event: StepEvent, metrics: RunMetrics) -> None: ...

    def finish(self, snapshot: MetricsSnapshot, stop_reason: str) -> None: ...

    def close(self) -> None: ...


class LinePrinter:
    """One plain line now and then, for logs; the summary at the end.

    Args:
        every_s: seconds between two lines; None for the summary alone.
    """

    def __init__(
        self, console: Console, every_s: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._every_s = every_s
        self._clock = clock
        self._next_s = 0.0
        self._info: RunInfo | None = None
        self._known_loop_start: int | None = None

    def start(self, info: RunInfo) -> None:
        self._info = info
        if self._every_s is not None:
            there = f", {count(info.num_written)} are there" if info.num_written else ""
            self._print(f"writing {count(info.num_tokens)} tokens with {info.preset} to {info.output}{there}")

    def prefill(self, done_tokens: int, total_tokens: int) -> None:
        if self._due():
            what = "what is written" if self._info and self._info.num_written else "the prompt"
            self._print(f"reading {what}: {count(done_tokens)} of {count(total_tokens)} tokens")

    def step(self, event: StepEvent, metrics: RunMetrics) -> None:
        if self._every_s is not None:
            self._warn(metrics.loop)
        if self._info is not None and self._due():
            self._print(progress_line(metrics.snapshot(), self._info.num_tokens))

    def finish(self, snapshot: MetricsSnapshot, stop_reason: str) -> None:
        assert self._info is not None
        self._console.print(_summary(snapshot, self._info, stop_reason))

    def close(self) -> None: ...

    def _warn(self, loop: Loop | None) -> None:
        """One line for every loop; the next line of progress comes when it would have come."""
        if loop is not None and loop.start != self._known_loop_start:
            self._console.print(Text(f"warning: {loop_words(loop)}"), soft_wrap=True)
        self._known_loop_start = None if loop is None else loop.start

    def _due(self) -> bool:
        return self._every_s is not None and self._clock() >= self._next_s

    def _print(self, line: str) -> None:
        self._console.print(Text(harmless(line)), soft_wrap=True)
        self._next_s = self._clock() + (self._every_s or 0.0)


class LivePanel:
    """A panel that is redrawn in place at most eight times a second, and goes when the run ends."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._next_s = 0.0
        self._info: RunInfo | None = None
        self._tail = TextTail()
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)

    def start(self, info: RunInfo) -> None:
        self._info = info
        self._live.start()

    def prefill(self, done_tokens: int, total_tokens: int) -> None:
        if self._due():
            label = "reading" if self._info and self._info.num_written else "prompt"
            self._draw([self._bar_line(label, done_tokens, total_tokens)])

    def step(self, event: StepEvent, metrics: RunMetrics) -> None:
        self._tail.add(event.text)
        if self._due():
            self._draw(self._lines(metrics.snapshot()))

    def finish(self, snapshot: MetricsSnapshot, stop_reason: str) -> None:
        assert self._info is not None
        self.close()
        self._console.print(_summary(snapshot, self._info, stop_reason))

    def close(self) -> None:
        self._live.stop()

    def _lines(self, snapshot: MetricsSnapshot) -> list[Text]:
        """The panel at one moment, without its title."""
        assert self._info is not None
        rate = snapshot.tokens_per_s_now
        left = self._info.num_tokens - snapshot.num_tokens
        lines = [
            self._bar_line(
                "writing", snapshot.num_tokens, self._info.num_tokens, duration(left / rate) if rate else ""
            )
        ]
        for label, value in figure_rows(snapshot):
            lines.append(Text.assemble((f"  {label:<{_LABEL_WIDTH}}", "dim"), value))
        num_lines = min(_NUM_TEXT_LINES, self._console.height - _NUM_OTHER_LINES)
        if num_lines > 0:
            tail = self._tail.last_lines(self._console, self._console.width - 4, num_lines)
            lines += [Text(), *(Text.assemble("  ", line) for line in tail)]
        return lines

    def _bar_line(self, label: str, done: int, total: int, eta: str = "") -> Text:
        share = done / total if total else 1.0
        figures = f"  {count(done)} / {count(total)}  {share:4.0%}" + (f"  ETA {eta:<7}" if eta else "")
        width = max(0, self._console.width - _LABEL_WIDTH - len(figures) - 4)
        filled = min(width, round(share * width))
        return Text.assemble(
            (f"  {label:<{_LABEL_WIDTH}}", "dim"),
            ("━" * filled, "cyan"),
            ("━" * (width - filled), "bright_black"),
            (figures, "bold"),
        )

    def _due(self) -> bool:
        return self._clock() >= self._next_s

    def _draw(self, lines: list[Text]) -> None:
        # Plain lines, not a rich Panel with tables: drawing costs a third, and without a right border
        # text whose width the terminal sees differently (emoji, right-to-left) cannot break it.
        assert self._info is not None
        width = self._console.width
        title = Text.assemble(
            ("── ", "dim"),
            ("swiftgen ", "bold cyan"),
            f"{harmless(self._info.preset)} → {harmless(self._info.output)} ",
        )
        title.append("─" * max(0, width - title.cell_len), "dim")
        content = [title, *lines, Text("─" * width, "dim")][: max(1, self._console.height - 1)]
        for line in content:
            line.no_wrap, line.overflow = True, "ellipsis"
        self._live.update(Group(*content), refresh=True)
        self._next_s = self._clock() + REFRESH_INTERVAL_S


def _summary(snapshot: MetricsSnapshot, info: RunInfo, stop_reason: str) -> Table:
    table = Table(
        box=HORIZONTALS, show_header=False, title=None, border_style="dim", padding=(0, 1), pad_edge=True
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in summary_rows(snapshot, info.output, info.exactness, stop_reason):
        table.add_row(label, value)
    return table
