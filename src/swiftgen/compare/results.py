"""What a comparison found: medians over the seeds, as numbers, JSON and CSV.

`docs/compare.md` describes compare.json. A change that its readers would trip over raises `FORMAT`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from swiftgen.compare.contenders import Contender
from swiftgen.compare.measure import Mark, Run
from swiftgen.document.recorded import num_shared

FORMAT = 1


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest value over the seeds."""

    median: float
    min: float
    max: float


@dataclass(frozen=True)
class Row:
    """One contender at one length; acceptance and speed-up are None where there are none.

    Args:
        num_tokens: Length of the text.
        acceptance_rate_now: Over its last `NOW_WINDOW_TOKENS` tokens.
        seconds: Since the prompt was read.
        tokens_per_s: Average over the text so far.
        tokens_per_s_here: Since the length before.
        speedup: Tokens/s over those of the reference with the same seed.
        draft_s, verify_s, sample_s: Of `seconds`.
        distinct: Distinct-1 to Distinct-4.
    """

    num_tokens: int
    seconds: Spread
    tokens_per_s: Spread
    tokens_per_s_here: Spread
    speedup: Spread | None
    acceptance_rate: Spread | None
    acceptance_rate_now: Spread | None
    tokens_per_step: Spread
    draft_s: float
    verify_s: float
    sample_s: float
    distinct: tuple[float, ...]


@dataclass(frozen=True)
class Standing:
    """One contender in all its runs.

    Args:
        same_text: Whether every text is that of the reference, for those that have to write it, else None.
        num_same_tokens: How many tokens the texts share with those of the reference from the start, at
            least; None for the reference itself.
        rows: By length; the last one is the whole text.
    """

    contender: Contender
    prefill_s: Spread
    memory_bytes: int | None
    same_text: bool | None
    num_same_tokens: int | None
    rows: tuple[Row, ...]
    runs: tuple[Run, ...]

    @property
    def end(self) -> Row:
        """The figures of the whole text."""
        return self.rows[-1]


@dataclass(frozen=True)
class Comparison:
    """All standings, in the order of the contenders.

    Args:
        title: For people.
        facts: What was compared with what, on which machine; plain values.
        failures: Contenders that could not run, with the reason.
    """

    title: str
    facts: Mapping[str, Any]
    standings: tuple[Standing, ...]
    failures: Mapping[str, str]


def standings_of(contenders: Sequence[Contender], runs: Sequence[Run]) -> tuple[Standing, ...]:
    """Put runs together; contenders without a run are left out."""
    by_name: dict[str, dict[int, Run]] = {contender.name: {} for contender in contenders}
    for run in runs:
        by_name[run.contender][run.seed] = run
    return tuple(
        _standing(contender, by_name[contender.name], by_name.get(contender.reference, {}))
        for contender in contenders
        if by_name[contender.name]
    )


def _standing(contender: Contender, runs: Mapping[int, Run], reference: Mapping[int, Run]) -> Standing:
    pairs = [(run, reference[seed]) for seed, run in runs.items() if seed in reference]
    shared = [num_shared(run.token_ids, other.token_ids) for run, other in pairs]
    has_to_match = contender.draws_like_ar and contender.reference and pairs
    memory = [run.memory_bytes for run in runs.values() if run.memory_bytes is not None]
    any_run = next(iter(runs.values()))
    return Standing(
        contender,
        _spread([run.prefill_s for run in runs.values()]),
        max(memory, default=None),
        all(run.token_ids == other.token_ids for run, other in pairs) if has_to_match else None,
        min(shared, default=None),
        tuple(_row(list(runs.values()), pairs, index) for index in range(len(any_run.marks))),
        tuple(runs.values()),
    )


def _row(runs: Sequence[Run], pairs: Sequence[tuple[Run, Run]], index: int) -> Row:
    marks = [run.marks[index] for run in runs]
    ratios = [one.marks[index].tokens_per_s / other.marks[index].tokens_per_s for one, other in pairs]
    return Row(
        num_tokens=min(mark.num_tokens for mark in marks),
        seconds=_spread([mark.seconds for mark in marks]),
        tokens_per_s=_spread([mark.tokens_per_s for mark in marks]),
        tokens_per_s_here=_spread([_rate_since(run.marks, index) for run in runs]),
        speedup=_spread(ratios) if ratios else None,
        acceptance_rate=_spread_of_known([mark.acceptance_rate for mark in marks]),
        acceptance_rate_now=_spread_of_known([mark.acceptance_rate_now for mark in marks]),
        tokens_per_step=_spread([mark.tokens_per_step for mark in marks]),
        draft_s=median(mark.draft_s for mark in marks),
        verify_s=median(mark.verify_s for mark in marks),
        sample_s=median(mark.sample_s for mark in marks),
        distinct=tuple(median(column) for column in zip(*(mark.distinct for mark in marks), strict=True)),
    )


def _rate_since(marks: Sequence[Mark], index: int) -> float:
    """Tokens/s since the mark before; the average where one step passed several marks."""
    here = marks[index]
    before = next((mark for mark in reversed(marks[:index]) if mark.num_tokens < here.num_tokens), None)
    if before is None:
        return here.tokens_per_s
    return (here.num_tokens - before.num_tokens) / (here.seconds - before.seconds)


def _spread_of_known(values: Sequence[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return _spread(known) if known else None


def _spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Plain values for compare.json."""
    return {
        "format": FORMAT,
        "title": comparison.title,
        **comparison.facts,
        "contenders": [_standing_json(standing) for standing in comparison.standings],
        "failures": dict(comparison.failures),
    }


def _standing_json(standing: Standing) -> dict[str, Any]:
    contender = standing.contender
    return {
        "name": contender.name,
        "description": contender.description,
        "reference": contender.reference or None,
        "notes": list(contender.notes),
        "num_prompt_tokens": len(contender.prompt_ids),
        "prefill_s": asdict(standing.prefill_s),
        "memory_bytes": standing.memory_bytes,
        "same_text": standing.same_text,
        "num_same_tokens": standing.num_same_tokens,
        "rows": [asdict(row) for row in standing.rows],
        "runs": [
            {
                "seed": run.seed,
                "prefill_s": run.prefill_s,
                "memory_bytes": run.memory_bytes,
                "token_ids_sha256": run.sha256,
                "marks": [asdict(mark) for mark in run.marks],
            }
            for run in standing.runs
        ],
    }


_COLUMNS: dict[str, Callable[[Row], float | None]] = {
    "num_tokens": lambda row: row.num_tokens,
    "seconds": lambda row: row.seconds.median,
    "tokens_per_s": lambda row: row.tokens_per_s.median,
    "tokens_per_s_min": lambda row: row.tokens_per_s.min,
    "tokens_per_s_max": lambda row: row.tokens_per_s.max,
    "tokens_per_s_here": lambda row: row.tokens_per_s_here.median,
    "speedup": lambda row: row.speedup.median if row.speedup else None,
    "acceptance_rate": lambda row: row.acceptance_rate.median if row.acceptance_rate else None,
    "acceptance_rate_now": lambda row: row.acceptance_rate_now.median if row.acceptance_rate_now else None,
    "tokens_per_step": lambda row: row.tokens_per_step.median,
    "draft_s": lambda row: row.draft_s,
    "verify_s": lambda row: row.verify_s,
    "sample_s": lambda row: row.sample_s,
}


def to_csv(comparison: Comparison) -> str:
    """One line for each contender and length."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    num_distinct = len(comparison.standings[0].end.distinct)
    writer.writerow(["contender", *_COLUMNS, *(f"distinct_{n + 1}" for n in range(num_distinct))])
    for standing in comparison.standings:
        for row in standing.rows:
            figures = [*(column(row) for column in _COLUMNS.values()), *row.distinct]
            writer.writerow([standing.contender.name, *("" if f is None else f"{f:.6g}" for f in figures)])
    return out.getvalue()
