"""How figures and text are put into words for people. Pure functions; nothing is printed here."""

from __future__ import annotations

import unicodedata
from collections import deque

from rich.console import Console
from rich.text import Text

from swiftgen.figures.loops import Loop
from swiftgen.figures.metrics import NOW_WINDOW_TOKENS, MetricsSnapshot
from swiftgen.settings.plans import SOURCES

Row = tuple[str, Text]  # label, value

_STOP_REASONS = {
    "length": "planned length reached",
    "eos": "the model ended the text",
    "interrupted": "interrupted",
    "loop": "stopped in a loop",
}
_SEPARATOR = (" · ", "dim")
_DROPPED = frozenset("\u200d\ufe0e\ufe0f\r")  # joiners and selectors: terminals disagree on the width
_TAB = " " * 4


def count(number: int) -> str:
    """1234567 -> 1,234,567"""
    return f"{number:,}"


def duration(seconds: float) -> str:
    """Seconds as 7.3 s, 3:07 or 1:02:05."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size(num_bytes: int) -> str:
    """Bytes as MiB or GiB."""
    mib = num_bytes / 2**20
    return f"{mib / 1024:.2f} GiB" if mib >= 1024 else f"{mib:.1f} MiB"


def loop_words(loop: Loop) -> str:
    """What a loop repeats and since when; tokens of the text count from 0."""
    tokens = "token" if loop.period == 1 else "tokens"
    return f"loop of {count(loop.period)} {tokens} since token {count(loop.start)}"


def progress_line(snapshot: MetricsSnapshot, num_tokens: int) -> str:
    """One line for a log."""
    parts = [f"{count(snapshot.num_tokens)}/{count(num_tokens)} tokens"]
    if snapshot.tokens_per_s_now and snapshot.tokens_per_s:
        left_s = (num_tokens - snapshot.num_tokens) / snapshot.tokens_per_s_now
        parts.append(f"{snapshot.tokens_per_s_now:.1f} tokens/s ({snapshot.tokens_per_s:.1f} average)")
        parts.append(f"ETA {duration(left_s)}")
    if snapshot.acceptance_rate is not None:
        parts.append(f"acceptance {snapshot.acceptance_rate:.0%}")
    parts.append(f"{snapshot.tokens_per_step or 0:.2f} tokens/step")
    return ", ".join(parts)


def figure_rows(snapshot: MetricsSnapshot) -> list[Row]:
    """The figures of the live panel."""
    now, average = snapshot.tokens_per_s_now or 0.0, snapshot.tokens_per_s or 0.0
    rows = [
        (
            "speed",
            _joined(
                _figure(f"{now:.1f}", " tokens/s now"),
                _figure(f"{average:.1f}", " average"),
                _figure(duration(snapshot.decode_s), " so far"),
            ),
        ),
        ("acceptance", _acceptance(snapshot)),
        ("drafts won", _wins(snapshot)),
        ("distinct", _distinct(snapshot)),
        ("context", _context(snapshot)),
    ]
    if snapshot.loop is not None:
        rows.append(("repeating", Text(loop_words(snapshot.loop), "bold yellow")))
    return rows


def summary_rows(snapshot: MetricsSnapshot, output: str, exactness: str, stop_reason: str) -> list[Row]:
    """The table at the end of a run."""
    reason = _STOP_REASONS.get(stop_reason, stop_reason)
    rate = snapshot.tokens_per_s or 0.0
    rows = [
        ("written", _joined(_figure(count(snapshot.num_tokens), f" tokens to {harmless(output)}"), reason)),
        (
            "speed",
            _joined(
                _figure(f"{rate:.1f}", " tokens/s"),
                _figure(duration(snapshot.decode_s), " decoding"),
                _figure(duration(snapshot.prefill_s), " reading the prompt"),
            ),
        ),
        ("time", _time_shares(snapshot)),
        ("acceptance", _acceptance(snapshot)),
        ("drafts won", _wins(snapshot)),
        ("distinct", _distinct(snapshot)),
        ("context", _context(snapshot)),
        ("exactness", Text(exactness)),
    ]
    if snapshot.longest_loop is not None:
        rows.insert(-2, ("loops", _loops(snapshot.num_loops, snapshot.longest_loop)))
    return rows


class TextTail:
    """The end of the text, for display."""

    def __init__(self, num_chars: int = 4000) -> None:
        self._num_chars = num_chars
        self._parts: deque[str] = deque()
        self._size = 0

    def add(self, text: str) -> None:
        """Appends text and forgets what is too old."""
        if text:
            self._parts.append(text)
            self._size += len(text)
        while len(self._parts) > 1 and self._size - len(self._parts[0]) >= self._num_chars:
            self._size -= len(self._parts.popleft())

    def last_lines(self, console: Console, width: int, num_lines: int) -> list[Text]:
        """Exactly `num_lines` lines of at most `width` cells, the newest last."""
        tail = "".join(self._parts)[-width * num_lines * 2 :]
        lines: list[Text] = []
        for paragraph in reversed(harmless(tail, keep_newlines=True).split("\n")[-num_lines:]):
            lines[:0] = Text(paragraph).wrap(console, max(1, width), overflow="fold")
            if len(lines) >= num_lines:
                break
        lines = lines[-num_lines:]
        return lines + [Text() for _ in range(num_lines - len(lines))]


def harmless(text: str, keep_newlines: bool = False) -> str:
    """Text that cannot move the cursor, change colours or reorder a line of the terminal."""
    return "".join(
        character if character.isprintable() else _shown(character, keep_newlines)
        for character in text
        if character not in _DROPPED
    )


def _shown(character: str, keep_newlines: bool) -> str:
    if character == "\n" and keep_newlines:
        return character
    if character == "\t":
        return _TAB
    if ord(character) < 0x20:
        return chr(0x2400 + ord(character))  # the picture of the control character
    return " " if unicodedata.category(character) == "Zs" else "\N{MIDDLE DOT}"


def _joined(*parts: Text | str) -> Text:
    text = Text()
    for part in parts:
        if text:
            text.append(*_SEPARATOR)
        text.append(part)
    return text


def _figure(value: str, unit: str = "") -> Text:
    return Text.assemble((value, "bold"), unit)


def _acceptance(snapshot: MetricsSnapshot) -> Text:
    per_step = _figure(f"{snapshot.tokens_per_step or 0:.2f}", " tokens per step")
    steps = _figure(count(snapshot.num_steps), " steps")
    if snapshot.acceptance_rate is None:
        return _joined("nothing drafted", per_step, steps)
    rates = [_figure(f"{snapshot.acceptance_rate:.1%}", " of drafts")]
    num_new = snapshot.num_tokens - snapshot.num_tokens_before
    if num_new > NOW_WINDOW_TOKENS and snapshot.acceptance_rate_now is not None:
        rates.append(
            _figure(f"{snapshot.acceptance_rate_now:.1%}", f" in the last {count(NOW_WINDOW_TOKENS)} tokens")
        )
    return _joined(*rates, per_step, steps)


def _wins(snapshot: MetricsSnapshot) -> Text:
    total = snapshot.num_accepted
    if not total:
        return Text("none")
    known = [name for name in SOURCES if snapshot.wins.get(name)]
    names = known + sorted(set(snapshot.wins) - set(SOURCES))
    return _joined(
        *(
            Text.assemble(
                f"{SOURCES.get(name, name)} ",
                (f"{snapshot.wins[name] / total:.0%}", "bold"),
            )
            for name in names
        )
    )


def _distinct(snapshot: MetricsSnapshot) -> Text:
    return _joined(
        *(
            Text.assemble((f"{n}: ", "dim"), (f"{value:.3f}", "bold"))
            for n, value in enumerate(snapshot.distinct, start=1)
        )
    )


def _loops(num_loops: int, longest: Loop) -> Text:
    which = loop_words(longest) if num_loops == 1 else f"the longest: {loop_words(longest)}"
    return _joined(
        _figure(count(num_loops), " found"), which, _figure(count(longest.num_repeated), " repeated")
    )


def _context(snapshot: MetricsSnapshot) -> Text:
    return _joined(
        _figure(count(snapshot.context_tokens), " tokens"), _figure(size(snapshot.kv_bytes), " KV cache")
    )


def _time_shares(snapshot: MetricsSnapshot) -> Text:
    shares = {
        "draft": snapshot.draft_s,
        "verify": snapshot.verify_s,
        "sampling": snapshot.sample_s,
        "other": snapshot.other_s,
    }
    return _joined(
        *(
            Text.assemble(f"{name} ", (f"{spent_s / (snapshot.decode_s or 1):.0%}", "bold"))
            for name, spent_s in shares.items()
        )
    )
