"""What `doctor` finds out: one finding for each question, and checks that may fail without harm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from swiftgen.system.errors import SwiftgenError

State = Literal["ok", "note", "missing", "unknown"]
"""note: works, and could be better; missing: nothing can be written without it; unknown: the check failed."""


@dataclass(frozen=True)
class Finding:
    """The answer to one question.

    Args:
        text: For people, one line.
        state: How good it is.
        advice: What to do about it; empty if there is nothing to do.
        figures: The same for programs, in JSON's types.
    """

    text: str
    state: State = "ok"
    advice: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """All of it in one flat object."""
        return {"state": self.state, "text": self.text, "advice": self.advice, **self.figures}


Section = dict[str, Finding]
"""By the name of what was asked."""

Check = Callable[[], Finding | None]
"""None where the question does not arise."""


def run_checks(checks: Mapping[str, Check], needed: frozenset[str] = frozenset()) -> Section:
    """Ask all questions in their order, whatever happens to one of them.

    Args:
        checks: By name.
        needed: Those without whose answer nothing can be written.
    """
    section = {}
    for name, check in checks.items():
        finding = _answer(check, name in needed)
        if finding is not None:
            section[name] = finding
    return section


def _answer(check: Check, is_needed: bool) -> Finding | None:
    try:
        return check()
    except SwiftgenError as error:
        return Finding(error.message, "missing" if is_needed else "note", error.hint)
    except Exception as error:  # a probe of the system fails in ways nobody has listed
        reason = " ".join(str(error).split()) or "no reason given"
        text = f"could not be found out ({type(error).__name__}: {reason})"
        return Finding(text, "missing" if is_needed else "unknown")
