"""Sweeps: the same document under several values of one setting, each measured against plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from swiftgen.compare.contenders import AR, OWN_WAYS, Way
from swiftgen.settings.files import YamlError, parse_scalar
from swiftgen.settings.plans import PLANS
from swiftgen.settings.presets import check_setting
from swiftgen.settings.schema import IN_MEMORY, WITHOUT_EFFECT, Preset
from swiftgen.system.errors import SwiftgenError

PROMPT = "prompt"
_NAMES = {"budget": "kv_budget", "temperature": "sampler.temperature"}
_CACHES: dict[str, Mapping[str, Any]] = {
    "full": {"kv_budget": 1 << 30},
    "partial": {"refresh": "recent"},
    "dynamic": {"refresh": "importance"},
}
_OF_DRAFTING = frozenset({"draft"}).union(*(plan.reads for plan in PLANS.values()))
"""Settings that change the speed but never the text."""

_REFUSED = {
    **dict.fromkeys(WITHOUT_EFFECT, "no run depends on it"),
    "eos": "texts that end at different places could not be compared",
}
"""Settings that cannot be swept, and why."""


@dataclass(frozen=True)
class Point:
    """One value of a sweep.

    Args:
        label: How it was given.
        overrides: What it sets.
        prompt_tokens: Length to cut the prompt to; None leaves it.
    """

    label: str
    overrides: Mapping[str, Any]
    prompt_tokens: int | None = None

    @property
    def changes_text(self) -> bool:
        """Whether plain decoding writes another text under it."""
        return self.prompt_tokens is not None or not self.overrides.keys() <= _OF_DRAFTING

    @property
    def needs_engine(self) -> bool:
        """Whether other weights, or heads, are in memory under it."""
        return any(key.partition(".")[0] in IN_MEMORY for key in self.overrides)


@dataclass(frozen=True)
class Sweep:
    """A setting, as it was called, and its values."""

    name: str
    points: tuple[Point, ...]


def parse_sweep(text: str, draft: str) -> Sweep:
    """Read `name=value,value,...`; values are YAML, so lists are possible.

    Args:
        draft: The preset's plan.

    Raises:
        SwiftgenError: no such setting, no value, one that cannot be swept, or that this plan does not read.
    """
    name, equals, raw = text.partition("=")
    name = name.strip()
    try:
        values = parse_scalar(f"[{raw}]") if equals else None
    except YamlError as error:
        raise SwiftgenError(f"--sweep {text!r}: the values are not valid YAML") from error
    if not name or not isinstance(values, list) or not values:
        raise SwiftgenError(
            f"--sweep {text!r} is not name=value,value,...", "Example: --sweep tree=[1,3,3,3],[1,9,9,9]"
        )
    point_of = _point_reader(name)
    points = tuple(point_of(value) for value in values)
    for point in points:
        for key in point.overrides:
            readers = [plan for plan in PLANS.values() if key in plan.reads]
            if readers and PLANS[draft] not in readers:
                reader = min(readers, key=lambda plan: plan.measured)  # a fixed plan reads it every step
                raise SwiftgenError(
                    f"--sweep {name}: with draft={draft} {key} has no effect",
                    f"add --set draft={reader.name}",
                )
    if len({point.label for point in points}) < len(points):
        raise SwiftgenError(f"--sweep {text!r} names a value twice")
    return Sweep(name, points)


def ways_of(sweep: Sweep, preset_of: Callable[[Mapping[str, Any]], Preset]) -> list[Way]:
    """swiftgen at every point, and plain decoding before it: once, or once for each text and each engine.

    Args:
        preset_of: The settings of the comparison under overrides.
    """
    ways: list[Way] = []
    for point in sweep.points:
        text, plain = OWN_WAYS[AR]
        reference = AR
        if point.changes_text or point.needs_engine:
            reference, plain = f"{AR}, {point.label}", {**point.overrides, **plain}
        if all(way.name != reference for way in ways):
            ways.append(Way(reference, text, preset_of(plain), "", point.prompt_tokens))
        preset = preset_of(point.overrides)
        ways.append(Way(point.label, f"swiftgen, {point.label}", preset, reference, point.prompt_tokens))
    return ways


def _point_reader(name: str) -> Callable[[Any], Point]:
    if name == "cache":
        return _cache_point
    if name == PROMPT:
        return _prompt_point
    key = _NAMES.get(name, name)
    check_setting(key)
    if key in _REFUSED:
        raise SwiftgenError(f"--sweep {name}: {key} cannot be swept, {_REFUSED[key]}")
    return lambda value: Point(f"{name}={_label(value)}", {key: value})


def _cache_point(value: Any) -> Point:
    if not isinstance(value, str) or value not in _CACHES:
        raise SwiftgenError(f"--sweep cache={value}: allowed are {', '.join(_CACHES)}")
    return Point(f"cache={value}", _CACHES[value])


def _prompt_point(value: Any) -> Point:
    if not isinstance(value, int) or value < 1:
        raise SwiftgenError(f"--sweep prompt={value}: allowed are whole numbers of tokens, 1 or more")
    return Point(f"prompt={value}", {}, value)


def _label(value: Any) -> str:
    return str(value).replace(" ", "")
