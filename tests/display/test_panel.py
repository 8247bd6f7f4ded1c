"""What a person sees: never wrapped, never broken by the text, never in the way."""

from __future__ import annotations

import io
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from support.terminals import INFO, Clock, frame, step, terminal, written
from swiftgen.decoding.decode import StepEvent
from swiftgen.display.panel import Display, LinePrinter, LivePanel, make_reporter
from swiftgen.display.wording import TextTail, count, duration, figure_rows, harmless, size
from swiftgen.figures.metrics import RunMetrics

NASTY = "The \x1b[2J[bold]sea[/bold] \x07日本語 👩‍👩‍👧‍👦 \u202eabc\u202c שלום e\u0301\r\n\tend\x00\u2028x"


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60), (40, 12), (20, 8)])
def test_the_panel_fits_whatever_the_text_is(width: int, height: int) -> None:
    clock = Clock()
    panel, metrics = LivePanel(terminal(width, height), clock), RunMetrics(clock)
    panel.start(INFO)
    panel.prefill(0, 0)  # a prompt of one token has nothing to prefill
    for done in (0, 500, 2_048):
        clock.now_s += 1
        panel.prefill(done, 2_048)
        assert all(cell_len(line) <= width for line in frame(panel, width))
    for _ in range(30):
        clock.now_s += 1
        event = step(NASTY)
        metrics.observe(event)
        panel.step(event, metrics)
        lines = frame(panel, width)
        assert len(lines) < height
        assert all(cell_len(line) <= width for line in lines)
    panel.close()


def test_acceptance_of_late_stands_beside_the_average_of_a_long_text() -> None:
    metrics = RunMetrics()
    for accepted in (2, 0):
        assert "in the last" not in shown_acceptance(metrics)  # it would say the same twice
        for number in range(333):
            token_ids = (number, number + 1, number + 2)
            metrics.observe(StepEvent(token_ids, ("base",) * accepted, 2, 3, 0, 0, 0.1, 0.2, 0.01))
    # The last 334 steps, the first of which was right.
    assert "50.0% of drafts · 0.3% in the last 1,000 tokens" in shown_acceptance(metrics)


def shown_acceptance(metrics: RunMetrics) -> str:
    return dict(figure_rows(metrics.snapshot()))["acceptance"].plain


def test_the_panel_shows_the_figures() -> None:
    clock = Clock()
    panel, metrics = LivePanel(terminal(80, 24), clock), RunMetrics(clock)
    panel.start(INFO)
    for _ in range(2):
        clock.now_s += 1.4
        event = step("Once upon a time. ")
        metrics.observe(event)
        panel.step(event, metrics)
    shown = "\n".join(frame(panel, 80))
    panel.close()
    for expected in [
        "smollm2-135m → book.txt",
        "6 / 20,000",
        "3.3 tokens/s now · 3.3 average",
        "50.0% of drafts · 3.00 tokens per step · 2 steps",
        "base 50% · n-grams 50%",
        "1: 0.500 · 2: 0.600 · 3: 0.750 · 4: 1.000",
        "2,051 tokens · 300.0 MiB KV cache",
        "Once upon a time. Once upon a time.",
        "ETA 1:39:58",  # 19,994 tokens at 6 tokens in 1.8 s
    ]:
        assert expected in shown


def test_the_panel_is_drawn_at_most_eight_times_a_second_and_leaves_nothing_behind() -> None:
    clock = Clock()
    console = terminal(80, 24)
    panel, metrics = LivePanel(console, clock), RunMetrics(clock)
    panel.start(INFO)
    for _ in range(1000):
        clock.now_s += 0.01
        event = step("x")
        metrics.observe(event)
        panel.step(event, metrics)
    assert 60 <= written(console).count("swiftgen") <= 81
    panel.finish(metrics.snapshot(), "length")
    panel.close()
    summary = written(console).rpartition("swiftgen")[2]
    assert "3,000" in summary
    assert "planned length reached" in summary
    assert "\x1b[?25h" in written(console)  # the cursor is back


def test_lines_come_every_ten_seconds_without_control_codes() -> None:
    clock = Clock()
    console = Console(file=io.StringIO(), width=80)
    lines, metrics = LinePrinter(console, every_s=10, clock=clock), RunMetrics(clock, find_loops=False)
    lines.start(INFO)
    for _ in range(95):
        clock.now_s += 0.5
        event = step(NASTY)
        metrics.observe(event)
        lines.step(event, metrics)
    printed = written(console).splitlines()
    assert len(printed) == 5
    assert printed[0] == "writing 20,000 tokens with smollm2-135m to book.txt"
    assert printed[1].startswith("60/20,000 tokens, 6.0 tokens/s (6.1 average), ETA 55:23")
    assert "acceptance 50%" in printed[1]
    lines.finish(metrics.snapshot(), "eos")
    assert "the model ended the text" in written(console)
    assert "lossless (checked at start)" in written(console)
    assert "\x1b" not in written(console)


def test_summary_alone_and_quiet() -> None:
    metrics = RunMetrics()
    displays: list[tuple[Display, bool]] = [("summary", False), ("quiet", True)]
    for display, is_silent in displays:
        console = Console(file=io.StringIO(), width=80)
        reporter = make_reporter(display, console)
        reporter.start(INFO)
        reporter.prefill(1, 2)
        event = step("x")
        metrics.observe(event)
        reporter.step(event, metrics)
        assert written(console) == ""
        reporter.finish(metrics.snapshot(), "interrupted")
        reporter.close()
        assert (written(console) == "") is is_silent


def test_a_summary_without_a_single_step() -> None:
    console = Console(file=io.StringIO(), width=80)
    reporter = make_reporter("summary", console)
    reporter.start(INFO)
    reporter.finish(RunMetrics().snapshot(), "interrupted")
    assert "nothing drafted" in written(console)


@given(st.text())
def test_harmless_text_has_no_control_characters(text: str) -> None:
    assert harmless(text).isprintable()
    assert not {unicodedata.category(c) for c in harmless(text)} & {"Cc", "Cf", "Cs", "Zl", "Zp"}


def test_printable_text_stays_as_it_is() -> None:
    assert harmless("Zoë – 日本語 [bold]") == "Zoë – 日本語 [bold]"
    assert harmless("a\tb\x1b\u202e\nc") == "a    b␛·␊c"
    assert harmless("a\nb", keep_newlines=True) == "a\nb"


@given(st.lists(st.text(max_size=60), max_size=30), st.integers(10, 100), st.integers(1, 6))
def test_the_last_lines_fit_and_end_with_the_newest_text(
    parts: list[str], width: int, num_lines: int
) -> None:
    tail = TextTail(num_chars=300)
    for part in parts:
        tail.add(part)
    tail.add("END")
    lines = tail.last_lines(Console(width=width), width, num_lines)
    assert len(lines) == num_lines
    assert all(line.cell_len <= width for line in lines)
    assert "".join(line.plain for line in lines).rstrip().endswith("D")
    assert tail._size <= 300 + 60


def test_wording() -> None:
    assert count(1_234_567) == "1,234,567"
    assert [duration(s) for s in (0.04, 9.94, 61, 3_725)] == ["0.0 s", "9.9 s", "1:01", "1:02:05"]
    assert [size(n) for n in (0, 3 * 2**20, 5 * 2**29)] == ["0.0 MiB", "3.0 MiB", "2.50 GiB"]
