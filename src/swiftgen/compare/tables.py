"""The tables of a comparison, in plain cells for the terminal and the report."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from swiftgen.compare.results import Comparison, Row, Spread, Standing
from swiftgen.display.wording import size

_NONE = "–"
NUM_LENGTHS = 5


@dataclass(frozen=True)
class Cells:
    """A table: its header, and rows as long as the header."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def end_table(comparison: Comparison) -> Cells:
    """One row for each contender: the whole text."""
    header = (
        "", "tokens/s", "from–to", "speed-up", "accepted", "tokens/step", "Distinct-1 2 3 4", "prompt",
        "memory", "text",
    )  # fmt: skip
    return Cells(header, tuple(_end_row(standing) for standing in comparison.standings))


def length_table(comparison: Comparison) -> Cells:
    """One row for each fifth of the length, as the paper's tables have it: acceptance rate and speed-up.

    Beside the acceptance so far stands that of the last 1,000 tokens, which shows whether drafts decay.
    """
    columns = [
        (f"{standing.contender.name} {what}", standing, figure)
        for standing in comparison.standings
        for what, figure in _figures_of(standing).items()
    ]
    num_rows = len(comparison.standings[0].rows)
    places = [max(0, num_rows * (i + 1) // NUM_LENGTHS - 1) for i in range(NUM_LENGTHS)]
    return Cells(
        ("length", *(name for name, _, _ in columns)),
        tuple(
            (
                f"{comparison.standings[0].rows[place].num_tokens:,}",
                *(figure(standing.rows[place]) for _, standing, figure in columns),
            )
            for place in sorted(set(places))
        ),
    )


def _figures_of(standing: Standing) -> dict[str, Callable[[Row], str]]:
    """What the table of lengths says of a contender: its speed, or what it gains."""
    if not standing.contender.reference:
        return {"tokens/s": _rate}
    if standing.end.acceptance_rate is None:
        return {"×": _speedup}
    return {"α": _acceptance, "α now": _acceptance_now, "×": _speedup}


def notes_of(comparison: Comparison) -> list[str]:
    """What the figures alone do not say, in sentences."""
    notes = []
    for standing in comparison.standings:
        contender = standing.contender
        if not contender.draws_like_ar:
            notes.append(f"{contender.name} draws random numbers of its own: its text is another one")
        notes += [f"{contender.name}: {note}" for note in contender.notes]
    notes += [f"{name} was left out: {reason}" for name, reason in comparison.failures.items()]
    return notes


def describe(comparison: Comparison) -> str:
    """The tables and notes, for a terminal or a file."""
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 140)
    with console.capture() as captured:
        console.print(comparison.title, style="bold", highlight=False)
        for cells in (end_table(comparison), length_table(comparison)):
            console.print(_rich(cells))
        for note in notes_of(comparison):
            console.print(f"- {note}", highlight=False, markup=False)
    return captured.get()


def _rich(cells: Cells) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(cells.header):
        table.add_column(name, justify="right" if number else "left")
    for row in cells.rows:
        table.add_row(*row)
    return table


def _end_row(standing: Standing) -> tuple[str, ...]:
    end = standing.end
    return (
        standing.contender.name,
        _rate(end),
        f"{end.tokens_per_s.min:.1f}–{end.tokens_per_s.max:.1f}",
        _speedup(end),
        _acceptance(end),
        f"{end.tokens_per_step.median:.2f}",
        " ".join(f"{share:.2f}" for share in end.distinct),
        f"{standing.prefill_s.median:.1f} s",
        _NONE if standing.memory_bytes is None else size(standing.memory_bytes),
        text_verdict(standing),
    )


def text_verdict(standing: Standing) -> str:
    """What is known of a contender's text, against that of its reference."""
    if not standing.contender.reference:
        return "the measure"
    if standing.same_text:
        return "identical"
    if standing.same_text is None and not standing.contender.draws_like_ar:
        return "own draws"
    if standing.num_same_tokens is None:
        return "not compared"
    return f"DIFFERS after {standing.num_same_tokens:,} tokens"


def _rate(row: Row) -> str:
    return f"{row.tokens_per_s.median:.1f}"


def _acceptance(row: Row) -> str:
    return _share(row.acceptance_rate)


def _acceptance_now(row: Row) -> str:
    return _share(row.acceptance_rate_now)


def _share(rate: Spread | None) -> str:
    return _NONE if rate is None else f"{100 * rate.median:.0f} %"


def _speedup(row: Row) -> str:
    return _NONE if row.speedup is None else f"{row.speedup.median:.2f}"
