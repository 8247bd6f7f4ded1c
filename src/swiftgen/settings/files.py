"""Preset files: strict YAML with line numbers, lookup by name or path, and `extends` chains.

This layer knows nothing about which keys exist. It returns flat entries, "sampler.min_p" -> value and the
place it was written at, so that `presets.py` can say in one line what is wrong and where.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from swiftgen.system.errors import SwiftgenError
from swiftgen.system.storage import expand_user

YAML_SUFFIXES = (".yaml", ".yml")
_MAX_DEPTH = 100
_MAX_DIGITS = 1_000  # more than 4,300 Python does not even print
_MAX_VALUES = 1_000_000

# PyYAML follows YAML 1.1, where 2e-4 is text because it has no dot. The YAML 1.2 form is what people write.
_YAML_12_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")


@dataclass(frozen=True)
class Entry:
    """A value from a preset file, where it was written, e.g. "mine.yaml, line 3", and the file's folder."""

    value: Any
    where: str
    folder: Path | None = None


class _Loader(yaml.SafeLoader):
    """Safe loader that refuses duplicate keys (plain YAML keeps the last one in silence)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key_node.value!r} is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


class YamlError(Exception):
    """A text that is not YAML, or that is none we take.

    Args:
        problem: what is wrong, in one line.
        line: counted from 1; None if the parser does not say.
    """

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem)
        self.line = line


class _Dumper(yaml.SafeDumper):
    """Safe dumper that quotes exactly the texts `_Loader` would read as something else."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _YAML_12_FLOAT, list("-+.0123456789"))
_Dumper.add_representer(
    list, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)
)


def read_yaml(text: str) -> tuple[yaml.Node | None, Any]:
    """What a YAML text says, and its syntax tree; None twice if it says nothing.

    Raises:
        YamlError: it is not YAML, names a key twice, or is too large once its aliases are followed.
    """
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return None, None
        if _num_values(root, {}) > _MAX_VALUES:
            raise yaml.YAMLError("it is too large once its aliases are followed")
        return root, loader.construct_document(root)
    except RecursionError as error:
        raise YamlError("it is nested too deeply") from error
    except Exception as error:  # PyYAML checks few values that have a tag: `!!int ""` is an IndexError
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or next(iter(str(error).splitlines()), "")
        is_said = isinstance(error, (yaml.YAMLError, ValueError)) and problem
        line = mark.line + 1 if mark is not None else None
        raise YamlError(problem if is_said else "a value does not fit its tag", line) from error


def parse_scalar(text: str) -> Any:
    """The value of a YAML scalar or flow list such as `0.1`, `null` or `[1, 3, 3, 3]`.

    Raises:
        YamlError: if the text is not YAML.
    """
    return read_yaml(text)[1]


def dump_yaml(data: Mapping[str, Any]) -> str:
    """YAML that `read_entries` reads back to equal values, keys in the given order."""
    return yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def read_entries(path: Path) -> dict[str, Entry]:
    """The settings of one preset file, flattened to dotted names.

    Raises:
        SwiftgenError: if the file cannot be read or is not a YAML mapping with unique text keys.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SwiftgenError(f"cannot read the preset {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SwiftgenError(f"{path}: a preset must be UTF-8 text (byte {error.start} is not)") from error
    try:
        root, data = read_yaml(text)
    except YamlError as error:
        line = f", line {error.line}" if error.line else ""
        raise SwiftgenError(f"{path}{line}: {error}", "Fix the YAML.") from error
    if root is None or not isinstance(data, dict):
        raise SwiftgenError(f"{path}: a preset must be a YAML mapping such as `k: 20`")
    return dict(_flatten(data, root, path, prefix=""))


def read_chain(path: Path, known: Mapping[str, Path], seen: tuple[Path, ...] = ()) -> dict[str, Entry]:
    """The settings of a preset file merged over those it `extends`, nearest file first.

    Args:
        path: the file to read.
        known: presets that `extends` may name, name -> file.
        seen: the files that led here.

    Raises:
        SwiftgenError: for an unreadable file, an unknown parent or a circle.
    """
    path = path.resolve()
    if path in seen:
        circle = " -> ".join(p.name for p in (*seen[seen.index(path) :], path))
        raise SwiftgenError(f"these presets extend each other in a circle: {circle}")
    entries = read_entries(path)
    parent = entries.pop("extends", None)
    merged: dict[str, Entry] = {}
    if parent is not None:
        if not isinstance(parent.value, str):
            raise SwiftgenError(f"extends is {parent.value!r} in {parent.where}: allowed is a name or a path")
        merged = read_chain(find_preset(parent.value, known, path.parent), known, (*seen, path))
        del merged["name"]
    merged |= entries
    merged.setdefault("name", Entry(path.stem, path.name))
    return merged


def find_preset(reference: str | Path, known: Mapping[str, Path], folder: Path | None = None) -> Path:
    """The file a preset name or path stands for; relative paths start at `folder`.

    Raises:
        SwiftgenError: if there is none, naming near names.
    """
    text = str(reference)
    if isinstance(reference, Path) or text.endswith(YAML_SUFFIXES) or "/" in text or "\\" in text:
        path = (folder or Path()) / expand_user(reference)
        if not os.path.isfile(path):
            problem = f"{path} is not a file" if os.path.exists(path) else f"there is no preset file {path}"
            raise SwiftgenError(problem, "`swiftgen presets` lists the built-in ones.")
        return path
    if text in known:
        return known[text]
    near = nearest(text, known)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    raise SwiftgenError(f"there is no preset named {text!r}", f"{hint}`swiftgen presets` lists all.")


def nearest(word: str, candidates: Iterable[str]) -> list[str]:
    """Up to two candidates spelt like `word`, best first; case does not count."""
    by_folded = {candidate.lower(): candidate for candidate in candidates}
    return [by_folded[m] for m in difflib.get_close_matches(word.lower(), by_folded, n=2, cutoff=0.5)]


def _flatten(
    data: Mapping[Any, Any], node: yaml.Node, path: Path, prefix: str
) -> Iterable[tuple[str, Entry]]:
    pairs = [pair for pair in node.value if isinstance(pair[0], yaml.ScalarNode)]
    key_nodes = {key_node.value: (key_node, value_node) for key_node, value_node in pairs}
    for key, value in data.items():
        if not isinstance(key, str) or key not in key_nodes:
            raise SwiftgenError(f"{path}: the key {key!r} is not text")
        key_node, value_node = key_nodes[key]
        # Settings are two levels deep at most; the limit stops a YAML alias that contains itself.
        if isinstance(value, dict) and prefix.count(".") < 2:
            yield from _flatten(value, value_node, path, prefix=f"{prefix}{key}.")
        else:
            where = f"{path}, line {key_node.start_mark.line + 1}"
            yield prefix + key, Entry(value, where, path.parent)


def _num_values(node: yaml.Node, known: dict[int, int], depth: int = 0) -> int:
    """Values below a node, every alias counted as what it stands for; one inside itself counts once."""
    if depth > _MAX_DEPTH:
        raise RecursionError
    if isinstance(node, yaml.ScalarNode):
        if node.tag.endswith(":int") and len(node.value) > _MAX_DIGITS:
            raise yaml.MarkedYAMLError(problem="a number is too long", problem_mark=node.start_mark)
        return 1
    if id(node) not in known:
        known[id(node)] = 0
        parts = node.value
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in parts for part in pair]
        known[id(node)] = 1 + sum(_num_values(part, known, depth + 1) for part in parts)
    return known[id(node)]
