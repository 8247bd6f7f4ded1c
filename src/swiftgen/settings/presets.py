"""Preset files made into a `Preset`: the built-in ones, overrides, and what is said of mistakes.

Precedence is flag > preset > default. Nothing in this folder imports torch or transformers, so that
`swiftgen --help` and `swiftgen presets` are quick.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from swiftgen.settings.files import (
    Entry,
    YamlError,
    dump_yaml,
    find_preset,
    nearest,
    parse_scalar,
    read_chain,
)
from swiftgen.settings.schema import Preset, setting_fields
from swiftgen.system.errors import SwiftgenError

DEFAULT_PRESET = "smollm2-135m"


@dataclass(frozen=True)
class PresetInfo:
    """One line of `swiftgen presets`."""

    name: str
    description: str
    path: Path


def load_preset(name_or_path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> Preset:
    """Read a preset and apply overrides.

    Args:
        name_or_path: a built-in name or a YAML file; None is the default preset.
        overrides: dotted names -> values, e.g. {"sampler.min_p": 0.1}; they win over the file.

    Raises:
        SwiftgenError: for an unknown preset, broken YAML, an unknown key or a value out of range.
    """
    known = _shipped()
    path = find_preset(DEFAULT_PRESET if name_or_path is None else name_or_path, known)
    entries = read_chain(path, known)
    for key, entry in entries.items():
        check_setting(key, entry.where)
    if "heads" in entries:
        entries["heads"] = _beside_the_preset(entries["heads"])
    _validate(entries)  # on its own first, so that a mistake in the file is reported with its line
    for key, value in (overrides or {}).items():
        check_setting(key)
        entries[key] = Entry(list(value) if isinstance(value, tuple) else value, "")
    return _validate(entries)


def parse_override(text: str) -> tuple[str, Any]:
    """Split `key=value` as given to `--set` into the dotted name and the value.

    The value is read as YAML, except for settings that are text, where it is taken as it stands (so that a
    system prompt may contain a colon); `null` or nothing clears those that may be empty.

    Raises:
        SwiftgenError: if there is no `=`, the key is unknown or the value is broken YAML.
    """
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise SwiftgenError(f"--set {text!r} is not key=value", "Example: --set sampler.min_p=0.1")
    check_setting(key)
    annotation = setting_fields()[key].annotation
    if annotation is str:
        return key, raw
    if annotation == (str | None):
        return key, None if raw in ("", "null", "~") else raw
    try:
        return key, parse_scalar(raw)
    except YamlError as error:
        raise SwiftgenError(f"--set {text!r}: the value is not valid YAML") from error


def list_presets() -> list[PresetInfo]:
    """The presets that come with the package, by name, the default first."""
    infos = []
    for name, path in sorted(_shipped().items(), key=lambda item: (item[0] != DEFAULT_PRESET, item[0])):
        infos.append(PresetInfo(name, load_preset(name).description, path))
    return infos


def preset_yaml(preset: Preset) -> str:
    """The resolved preset as YAML; loading it gives an equal preset."""
    return dump_yaml(preset.model_dump(mode="json"))


def _beside_the_preset(entry: Entry) -> Entry:
    """Heads that a preset file names by a path that starts at its own folder, by their full path."""
    if entry.folder is None or not isinstance(entry.value, str) or not entry.value:
        return entry
    path = entry.folder / entry.value
    return replace(entry, value=str(path)) if os.path.exists(path) else entry


@cache
def _shipped() -> dict[str, Path]:
    # In the package in an installed wheel, at the top of the repository in an editable install.
    here = Path(__file__).resolve()
    folders = (here.parents[1] / "presets", here.parents[3] / "presets")
    folder = next((f for f in folders if f.is_dir()), None)
    return {} if folder is None else {path.stem: path for path in folder.glob("*.yaml")}


def check_setting(key: str, where: str = "") -> None:
    """Raise SwiftgenError unless there is a setting of this dotted name.

    Args:
        where: Place of the mistake, for the message.
    """
    if key in setting_fields():
        return
    members = [name for name in setting_fields() if name.startswith(f"{key}.")]
    if members:
        raise SwiftgenError(f"{key} is a group{_in(where)}: set one of {', '.join(members)}")
    # `min_p` is what people write for `sampler.min_p`; difflib alone finds that too far away.
    near = [name for name in setting_fields() if name.rpartition(".")[2] == key.rpartition(".")[2]]
    near = near or nearest(key, setting_fields())
    hint = f"Did you mean {near[0]}?" if near else f"Known are {', '.join(setting_fields())}."
    raise SwiftgenError(f"unknown setting {key!r}{_in(where)}", hint)


def _validate(entries: Mapping[str, Entry]) -> Preset:
    nested: dict[str, Any] = {}
    for key, entry in entries.items():
        group, dot, name = key.rpartition(".")
        if dot:
            nested.setdefault(group, {})[name] = entry.value
        else:
            nested[key] = entry.value
    try:
        return Preset.model_validate(nested)
    except ValidationError as error:
        raise _explain(error, entries) from error


def _explain(error: ValidationError, entries: Mapping[str, Entry]) -> SwiftgenError:
    """The first problem of a validation error in one line."""
    problem = error.errors()[0]
    dotted = ".".join(str(part) for part in problem["loc"])
    key = next((name for name in setting_fields() if f"{dotted}.".startswith(f"{name}.")), None)
    if key is not None and key in entries:
        entry, allowed = entries[key], setting_fields()[key].description
        return SwiftgenError(f"{key} is {entry.value!r}{_in(entry.where)}: allowed is {allowed}")
    if problem["type"] == "missing":
        name = entries["name"]
        missing = "model.source" if dotted == "model" else dotted
        return SwiftgenError(f"the preset {name.value} ({name.where}) lacks {missing}")
    return SwiftgenError(str(problem["msg"]).removeprefix("Value error, "))


def _in(where: str) -> str:
    return f" in {where}" if where else ""
