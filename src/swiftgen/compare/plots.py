"""The plots of a comparison, as PNG files. Readable in print: lines differ in dash and marker too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swiftgen.compare.results import Comparison, Row, Spread, Standing
from swiftgen.system.errors import SwiftgenError

# Okabe and Ito's colours, which colour-blind readers tell apart.
_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
_DASHES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_COST_PARTS = {
    "draft": ("#E69F00", ""),
    "verify": ("#0072B2", "//"),
    "sampling and upkeep": ("#009E73", ".."),
    "other": ("#BBBBBB", ""),
    "not told": ("#E5E5E5", ""),
}
_SIZE, _DPI = (6.4, 4.0), 150


def draw_plots(comparison: Comparison, folder: Path) -> dict[Path, str]:
    """Draw into a folder; returns the files with what each shows.

    Raises:
        SwiftgenError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise SwiftgenError("plots need matplotlib", "pip install 'swiftgen[plots]'") from error
    plots: dict[str, tuple[str, Callable[[Any, Sequence[Standing]], None]]] = {
        "speed.png": ("Tokens per second as the text grows", _draw_speed),
        "time.png": ("Time since the prompt was read", _draw_time),
        "acceptance.png": ("Share of drafted levels that were accepted", _draw_acceptance),
        "distinct.png": ("Distinct-n of the whole text", _draw_distinct),
        "cost.png": ("Where the time of a token goes", _draw_cost),
    }
    drawn = {}
    for name, (title, draw) in plots.items():
        standings = comparison.standings
        if draw is _draw_acceptance:
            standings = tuple(standing for standing in standings if standing.end.acceptance_rate)
        if standings:
            _save(folder / name, title, draw, standings)
            drawn[folder / name] = title
    return drawn


def _save(file: Path, title: str, draw: Callable[[Any, Sequence[Standing]], None], of: Any) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    draw(axes, of)
    axes.set_title(title, fontsize=11)
    axes.grid(axis="x" if draw is _draw_cost else "y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(file, dpi=_DPI)


def _draw_speed(axes: Any, standings: Sequence[Standing]) -> None:
    _draw_lines(axes, standings, lambda row: row.tokens_per_s_here)
    axes.set(ylabel="tokens per second, since the point before", ylim=(0, None))


def _draw_time(axes: Any, standings: Sequence[Standing]) -> None:
    longest = max(standing.end.seconds.median for standing in standings)
    unit, seconds = ("minutes", 60) if longest > 600 else ("seconds", 1)
    _draw_lines(axes, standings, lambda row: _scaled(row.seconds, 1 / seconds))
    axes.set(ylabel=unit, ylim=(0, None))


def _draw_acceptance(axes: Any, standings: Sequence[Standing]) -> None:
    _draw_lines(
        axes, standings, lambda row: _scaled(row.acceptance_rate, 100) if row.acceptance_rate else None
    )
    axes.set(ylabel="accepted of drafted levels, %", ylim=(0, 100))


def _draw_lines(axes: Any, standings: Sequence[Standing], figure: Callable[[Row], Spread | None]) -> None:
    """Medians over the length, in a band from the smallest to the largest value."""
    for number, standing in enumerate(standings):
        points = [(row.num_tokens, spread) for row in standing.rows if (spread := figure(row))]
        x = [num_tokens for num_tokens, _ in points]
        colour = _COLOURS[number % len(_COLOURS)]
        axes.plot(
            x,
            [spread.median for _, spread in points],
            label=standing.contender.name,
            color=colour,
            linestyle=_DASHES[number % len(_DASHES)],
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=4,
            linewidth=1.5,
        )
        lows, highs = [s.min for _, s in points], [s.max for _, s in points]
        axes.fill_between(x, lows, highs, color=colour, alpha=0.12, linewidth=0)
    axes.set(xlabel="tokens written", xlim=(0, None))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(fontsize=9, frameon=False)


def _draw_distinct(axes: Any, standings: Sequence[Standing]) -> None:
    """Bars, grouped by n."""
    width = 0.8 / len(standings)
    for number, standing in enumerate(standings):
        shares = standing.end.distinct
        places = [n + (number - (len(standings) - 1) / 2) * width for n in range(len(shares))]
        bars = axes.bar(
            places,
            shares,
            width * 0.92,
            label=standing.contender.name,
            color=_COLOURS[number % len(_COLOURS)],
        )
        if len(standings) <= 4:
            axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=1)
    axes.set_xticks(range(len(shares)), [f"Distinct-{n + 1}" for n in range(len(shares))])
    axes.set(ylabel="unique n-grams / n-grams", ylim=(0, 1.08))
    _legend_below(axes, -0.08)


def _draw_cost(axes: Any, standings: Sequence[Standing]) -> None:
    """Stacked bars: milliseconds for each token written; contenders that do not tell have one part."""
    names = [standing.contender.name for standing in standings]
    parts: dict[str, list[float]] = {name: [] for name in _COST_PARTS}
    for standing in standings:
        end = standing.end
        told = end.draft_s, end.verify_s, end.sample_s
        rest = max(0.0, end.seconds.median - sum(told))
        seconds = (*told, rest, 0.0) if any(told) else (*told, 0.0, rest)
        for milliseconds, spent in zip(parts.values(), seconds, strict=True):
            milliseconds.append(1000 * spent / end.num_tokens)
    left = [0.0] * len(names)
    for (part, lengths), (colour, hatch) in zip(parts.items(), _COST_PARTS.values(), strict=True):
        axes.barh(
            names, lengths, left=left, label=part, color=colour, hatch=hatch, edgecolor="white", height=0.6
        )
        left = [begin + length for begin, length in zip(left, lengths, strict=True)]
    for name, total in zip(names, left, strict=True):
        axes.text(total, name, f" {total:.1f}", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds per token", xlim=(0, 1.12 * max(left)))
    _legend_below(axes, -0.14)


def _legend_below(axes: Any, place: float) -> None:
    axes.legend(fontsize=9, frameon=False, loc="upper center", bbox_to_anchor=(0.5, place), ncols=5)


def _scaled(spread: Spread, factor: float) -> Spread:
    return Spread(spread.median * factor, spread.min * factor, spread.max * factor)
