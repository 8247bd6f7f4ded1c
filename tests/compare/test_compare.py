"""`compare`: what is measured, how it is put together, and what can go wrong."""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import re
import sys
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import swiftgen
from support.model_files import HIDDEN_SIZE, MAX_POSITIONS, VOCAB_SIZE
from swiftgen.cli.app import main
from swiftgen.compare import foreign
from swiftgen.compare.contenders import Contender, OnEvent
from swiftgen.compare.measure import Mark, PeakMemory, Run, mark_lengths, run_in_turns
from swiftgen.compare.results import Comparison, standings_of, to_csv, to_json
from swiftgen.compare.sweep import _OF_DRAFTING, parse_sweep
from swiftgen.compare.tables import describe, end_table, length_table
from swiftgen.decoding.decode import StepEvent
from swiftgen.heads.files import HeadsInfo, save_heads
from swiftgen.heads.modules import new_heads
from swiftgen.native.build import kernels_for
from swiftgen.settings.schema import IN_MEMORY, WITHOUT_EFFECT, setting_fields
from swiftgen.system.errors import SwiftgenError

pytestmark = pytest.mark.usefixtures("module_cache")

CPU = torch.device("cpu")
PROMPT = ["--prompt", "Tell me of the sea."]


def event(*token_ids: int) -> StepEvent:
    return StepEvent(token_ids, ("heads",) * (len(token_ids) - 1), 3, 4, 0, 0, 0.1, 0.2, 0.01)


def contender(name: str, reference: str = "ar", step: int = 1, **options: Any) -> Contender:
    """Writes seed, seed + 1, ... in steps of `step` tokens."""

    def run(prompt_ids: Sequence[int], num_tokens: int, seed: int, on_event: OnEvent) -> None:
        token_ids = list(range(seed, seed + num_tokens))
        for first in range(0, num_tokens, step):
            on_event(event(*token_ids[first : first + step]))

    options = {"draws_like_ar": True} | options
    return Contender(name, f"it is {name}", options.pop("run", run), [1, 2], reference, **options)


def made_run(
    name: str, seed: int, token_ids: list[int], *seconds: float, acceptance: float | None = None
) -> Run:
    marks = [
        Mark(
            len(token_ids) * (i + 1) // len(seconds),
            s,
            acceptance,
            acceptance and acceptance / 2,
            2.0,
            s / 4,
            s / 2,
            s / 8,
            (0.5, 0.6, 0.7, 0.8),
        )
        for i, s in enumerate(seconds)
    ]
    return Run(name, seed, 1.0 + seed, 1000 * seed, tuple(marks), array("I", token_ids))


@pytest.fixture
def comparison() -> Comparison:
    """`fast` is twice as fast as `ar`, `other` draws for itself, `wrong` differs at its fourth token."""
    contenders = [
        contender("ar", reference=""),
        contender("other", draws_like_ar=False, notes=("it is peculiar",)),
        contender("wrong"),
        contender("fast"),
    ]
    runs = []
    for seed in (1, 2, 3):
        text = [seed] * 10
        runs += [
            made_run("ar", seed, text, 1.0 * seed, 2.0 * seed),
            made_run("other", seed, [9] * 10, 4.0, 8.0),
            made_run("wrong", seed, [*text[:3], 7, *text[4:]] if seed == 2 else text, 1.0, 2.0),
            made_run("fast", seed, text, 0.4 * seed, 1.0 * seed, acceptance=0.25 * seed),
        ]
    facts = {"preset": "tiny", "seeds": [1, 2, 3]}
    return Comparison("a <title>", facts, standings_of(contenders, runs), {"gone": "it is not installed"})


def test_runs_are_put_together(comparison: Comparison):
    ar, other, wrong, fast = comparison.standings
    assert [row.num_tokens for row in fast.rows] == [5, 10]
    assert fast.end.seconds.median == 2.0
    assert (fast.end.seconds.min, fast.end.seconds.max) == (1.0, 3.0)
    assert fast.rows[0].speedup is not None
    assert fast.rows[0].speedup.median == pytest.approx(2.5)
    assert fast.end.speedup is not None
    assert fast.end.speedup.median == pytest.approx(2.0)
    assert fast.end.tokens_per_s.median == pytest.approx(5.0)
    assert fast.end.tokens_per_s_here.median == pytest.approx(5 / (0.6 * 2))
    assert fast.end.acceptance_rate is not None
    assert fast.end.acceptance_rate.median == 0.5
    assert fast.prefill_s.median == 3.0
    assert fast.memory_bytes == 3000
    assert (ar.same_text, other.same_text, wrong.same_text, fast.same_text) == (None, None, False, True)
    assert (ar.num_same_tokens, other.num_same_tokens, wrong.num_same_tokens) == (None, 0, 3)
    assert ar.end.speedup is None
    # Ratios are of runs with the same seed: 8 s against 2, 4 and 6 s.
    assert other.end.speedup is not None
    assert (other.end.speedup.min, other.end.speedup.max) == (pytest.approx(0.25), pytest.approx(0.75))


def test_a_missing_run_of_the_reference_is_no_reason_to_fail():
    contenders = [contender("ar", reference=""), contender("fast")]
    runs = [
        made_run("ar", 1, [1, 2], 1.0),
        made_run("fast", 1, [1, 2], 1.0),
        made_run("fast", 2, [3, 4], 1.0),
    ]
    _, fast = standings_of(contenders, runs)
    assert fast.same_text
    assert fast.end.speedup is not None
    (alone,) = standings_of(contenders, runs[1:])
    assert (alone.same_text, alone.end.speedup) == (None, None)


def test_tables(comparison: Comparison):
    table = end_table(comparison)
    assert all(len(row) == len(table.header) for row in table.rows)
    cells = {row[0]: dict(zip(table.header, row, strict=True)) for row in table.rows}
    assert [cells[name]["text"] for name in ("ar", "other", "wrong", "fast")] == [
        "the measure", "own draws", "DIFFERS after 3 tokens", "identical",
    ]  # fmt: skip
    assert cells["fast"]["speed-up"] == "2.00"
    assert cells["fast"]["accepted"] == "50 %"
    assert cells["ar"]["from–to"] == "1.7–5.0"
    lengths = length_table(comparison)
    assert lengths.header == ("length", "ar tokens/s", "other ×", "wrong ×", "fast α", "fast α now", "fast ×")
    assert lengths.rows[-1] == ("10", "2.5", "0.50", "2.00", "50 %", "25 %", "2.00")
    text = describe(comparison)
    assert "other draws random numbers of its own" in text
    assert "other: it is peculiar" in text
    assert "gone was left out: it is not installed" in text


def test_json_and_csv_hold_the_same_figures(comparison: Comparison):
    data = json.loads(json.dumps(to_json(comparison)))
    assert data["format"] == 1
    assert data["seeds"] == [1, 2, 3]
    assert data["failures"] == {"gone": "it is not installed"}
    by_name = {entry["name"]: entry for entry in data["contenders"]}
    first = by_name["fast"]["runs"][0]
    assert first["token_ids_sha256"] == hashlib.sha256(b"\1\0\0\0" * 10).hexdigest()
    assert len(first["marks"]) == len(by_name["fast"]["rows"]) == 2
    rows = list(csv.DictReader(to_csv(comparison).splitlines()))
    assert len(rows) == 8
    for row in rows:
        place = 0 if row["num_tokens"] == "5" else 1
        figures = by_name[row["contender"]]["rows"][place]
        assert float(row["tokens_per_s"]) == pytest.approx(figures["tokens_per_s"]["median"], rel=1e-5)
        assert float(row["distinct_4"]) == figures["distinct"][3]
        assert (row["speedup"] == "") == (figures["speedup"] is None)


def test_lengths_are_even():
    assert mark_lengths(100) == list(range(5, 101, 5))
    assert mark_lengths(3) == [1, 2, 3]
    assert mark_lengths(1507)[-1] == 1507
    assert len(mark_lengths(1507)) == 20


def test_contenders_take_turns_and_begin_in_turn():
    seen: list[tuple[str, int]] = []
    runs: list[Run] = []
    steps: list[tuple[str, int]] = []

    def watched(name: str) -> Contender:
        plain = contender(name, step=7)

        def run(prompt_ids: Sequence[int], num_tokens: int, seed: int, on_event: OnEvent) -> None:
            assert prompt_ids == [1, 2]
            seen.append((name, num_tokens))
            plain.run(prompt_ids, num_tokens, seed, on_event)

        return contender(name, run=run)

    three = [watched(name) for name in "abc"]
    run_in_turns(three, 100, [5, 6], CPU, lambda *step: steps.append(step), runs.append, _never)
    assert seen == [(n, 32) for n in "abc"] + [(n, 100) for n in "abcbca"]
    assert [(run.contender, run.seed) for run in runs] == [*zip("abcbca", [5] * 3 + [6] * 3, strict=True)]
    assert sum(count for name, count in steps if name == "b") == 200
    assert runs[3].token_ids.tolist() == list(range(6, 106))
    marks = runs[0].marks
    assert [mark.num_tokens for mark in marks] == [
        -(-length // 7) * 7 if length < 99 else 100 for length in mark_lengths(100)
    ]
    assert marks[-1].verify_s == pytest.approx(15 * 0.2)
    assert marks[-1].acceptance_rate == pytest.approx((14 * 6 + 1) / (15 * 3))


def _never(*failure: Any) -> None:
    pytest.fail(f"failed: {failure}")


@pytest.mark.parametrize("fails_at", ["warm-up", "second run", "short"])
def test_one_that_fails_is_left_out_and_the_others_go_on(fails_at: str):
    plain = contender("bad")
    calls = itertools.count()

    def run(prompt_ids: Sequence[int], num_tokens: int, seed: int, on_event: OnEvent) -> None:
        call = next(calls)
        if (fails_at == "warm-up" and call == 0) or (fails_at == "second run" and call == 2):
            raise RuntimeError("out of luck")
        plain.run(prompt_ids, num_tokens - (fails_at == "short" and call == 2), seed, on_event)

    failures: list[str] = []
    runs: list[Run] = []
    run_in_turns(
        [contender("ar"), contender("bad", run=run)], 40, [1, 2, 3], CPU, lambda *_: None, runs.append,
        lambda who, error: failures.append(f"{who.name}: {error}"),
    )  # fmt: skip
    reason = "bad ended after 39 of 40 tokens" if fails_at == "short" else "out of luck"
    assert failures == [f"bad: {reason}"]
    assert [run.seed for run in runs if run.contender == "ar"] == [1, 2, 3]
    assert [run.seed for run in runs if run.contender == "bad"] == ([] if fails_at == "warm-up" else [1])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can set the peak back")
def test_the_memory_of_a_run_is_what_it_added_at_its_peak():
    held = torch.ones(20_000_000)
    memory = PeakMemory(CPU)
    added = torch.ones(10_000_000)
    del added
    grown = memory.grown_bytes()
    assert grown is not None
    assert 39e6 < grown < 60e6
    assert PeakMemory(CPU).grown_bytes() < 5e6  # type: ignore[operator]
    assert held.sum() == 2e7


def test_sweeps_are_read():
    trees = parse_sweep("tree=[1,3,3,3],[1,9]", "paper")
    assert [point.overrides for point in trees.points] == [{"tree": [1, 3, 3, 3]}, {"tree": [1, 9]}]
    assert [point.label for point in trees.points] == ["tree=[1,3,3,3]", "tree=[1,9]"]
    assert not any(point.changes_text for point in trees.points)
    heat = parse_sweep("temperature=0, 0.5", "auto")
    assert [point.overrides for point in heat.points] == [
        {"sampler.temperature": 0},
        {"sampler.temperature": 0.5},
    ]
    assert all(point.changes_text for point in heat.points)
    assert parse_sweep("budget=64", "self").points[0].overrides == {"kv_budget": 64}
    assert [p.prompt_tokens for p in parse_sweep("prompt=10,20", "none").points] == [10, 20]
    caches = parse_sweep("cache=full,partial,dynamic", "paper").points
    assert [point.overrides.get("refresh") for point in caches] == [None, "recent", "importance"]


@pytest.mark.parametrize(
    ("text", "draft", "message"),
    [
        ("k", "paper", "is not name=value"),
        ("k=", "paper", "is not name=value"),
        ("=1", "paper", "is not name=value"),
        ("k=[1", "paper", "not valid YAML"),
        ("kk=1", "paper", "unknown setting 'kk'"),
        ("k=1,2", "auto", "with draft=auto k has no effect"),
        ("budget=64,128", "heads", "kv_budget has no effect"),
        ("cache=big", "paper", "allowed are full, partial, dynamic"),
        ("prompt=0", "auto", "whole numbers"),
        ("prompt=x", "auto", "whole numbers"),
        ("k=1,1", "paper", "names a value twice"),
        ("heads=a,b", "none", "with draft=none heads has no effect"),
        ("name=a,b", "auto", "name cannot be swept, no run depends on it"),
        ("description=a,b", "auto", "description cannot be swept"),
        ("model.sha256=a,b", "auto", "model.sha256 cannot be swept"),
        ("eos=ignore,stop", "auto", "eos cannot be swept, texts that end at different places"),
    ],
)
def test_sweeps_that_make_no_sense(text: str, draft: str, message: str):
    with pytest.raises(SwiftgenError, match=re.escape(message)):
        parse_sweep(text, draft)


@pytest.mark.parametrize("text", ["k=1,2", "tree=[1],[2]", "ngram=3", "budget=64", "heads=a,b"])
def test_the_plan_that_reads_a_setting_is_named(text: str):
    with pytest.raises(SwiftgenError, match="with draft=none") as caught:
        parse_sweep(text, "none")
    assert caught.value.hint == "add --set draft=paper"


@pytest.mark.parametrize("name", IN_MEMORY + WITHOUT_EFFECT)
def test_what_sweeps_know_of_settings_are_settings(name: str):
    assert any(f"{key}.".startswith(f"{name}.") for key in setting_fields())


def test_every_setting_can_be_swept_or_is_refused():
    refused = {"name", "description", "model.sha256", "eos"}
    for key in refused:
        with pytest.raises(SwiftgenError, match=f"{key} cannot be swept"):
            parse_sweep(f"{key}=x", "auto")
    for key in setting_fields().keys() - refused:
        (point,) = parse_sweep(f"{key}=x", "paper").points
        assert point.needs_engine == (key.startswith("model.") or key in ("heads", "long_context"))
        assert point.changes_text == (key not in _OF_DRAFTING)


Compare = Callable[..., tuple[int, str, str]]


@pytest.fixture
def compare(preset_file: Path, capsys: pytest.CaptureFixture[str]) -> Compare:
    """Exit code, stdout and stderr."""

    def run(*options: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["compare", "-q", "--preset", str(preset_file), *PROMPT, *options])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def stored(compare: Compare, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """compare.json of a run."""

    def run(*options: str) -> dict[str, Any]:
        code, _, err = compare("-o", str(tmp_path / "report"), *options)
        assert code == 0, err
        data: dict[str, Any] = json.loads((tmp_path / "report" / "compare.json").read_text(encoding="utf-8"))
        return data

    return run


def test_end_to_end(stored: Callable[..., dict[str, Any]], tmp_path: Path, preset_file: Path):
    data = stored("-b", "ar", "-b", "hf", "-b", "hf-lookup", "-b", "paper", "-n", "60", "--seeds", "4,5")
    entries = {entry["name"]: entry for entry in data["contenders"]}
    assert list(entries) == ["ar", "hf", "hf-lookup", "paper", "swiftgen"]
    assert entries["swiftgen"]["same_text"] is True
    assert entries["paper"]["same_text"] is True
    assert entries["hf"]["same_text"] is None
    assert "penalty sees the whole context" in entries["hf"]["notes"][0]
    for entry in entries.values():
        assert [run["seed"] for run in entry["runs"]] == [4, 5]
        assert len(entry["rows"]) == 20
        assert entry["rows"][-1]["num_tokens"] == 60
    # The text is what `stream` writes with the seed.
    engine = swiftgen.load(str(preset_file), {"draft": "none"})
    token_ids = [t for e in engine.stream(PROMPT[1], num_tokens=60, seed=5) for t in e.token_ids]
    sha256 = hashlib.sha256(array("I", token_ids).tobytes()).hexdigest()
    assert entries["swiftgen"]["runs"][1]["token_ids_sha256"] == sha256
    folder = tmp_path / "report"
    assert {file.name for file in folder.iterdir()} == {
        "compare.json", "compare.csv", "report.html", "speed.png", "time.png", "acceptance.png",
        "distinct.png", "cost.png",
    }  # fmt: skip
    html = (folder / "report.html").read_text(encoding="utf-8")
    assert html.count("data:image/png;base64,") == 5
    assert not re.search(r"(?:src|href)=.?https?:", html)
    assert "<td>identical</td>" in html
    for file in folder.glob("*.png"):
        assert file.read_bytes().startswith(b"\x89PNG")


def test_greedy_generate_writes_the_same_text(stored: Callable[..., dict[str, Any]]):
    """An outside check of all of it: prompt, length, penalty, suppressed tokens. The context is within W."""
    data = stored("-b", "ar", "-b", "hf", "-n", "50", "--seeds", "1", "--set", "sampler.temperature=0")
    entries = {entry["name"]: entry for entry in data["contenders"]}
    assert entries["hf"]["num_same_tokens"] == 50


def test_medusa_and_triforce(compare: Compare):
    code, out, err = compare(
        "-b", "ar", "-b", "medusa", "-b", "triforce", "-n", "40", "--seeds", "1", "--json"
    )
    assert code == 0
    data = json.loads(out)
    assert out.count("\n") == 1
    assert [entry["name"] for entry in data["contenders"]] == ["ar", "triforce", "swiftgen"]
    assert "no draft heads" in data["failures"]["medusa"]
    assert "medusa is left out" in err
    assert data["contenders"][1]["same_text"] is True


def test_a_sweep_over_speed_has_one_measure(
    stored: Callable[..., dict[str, Any]], compare: Compare, tmp_path: Path
):
    options = (
        "--sweep",
        "k=0,5",
        "--sweep",
        "tree=[1,1],[1,3]",
        "--set",
        "draft=paper",
        "-n",
        "30",
        "--seeds",
        "1",
    )
    code, out, _ = compare("-o", str(tmp_path / "sweeps"), *options)
    assert code == 0
    for name, labels in (("k", ["ar", "k=0", "k=5"]), ("tree", ["ar", "tree=[1,1]", "tree=[1,3]"])):
        data = json.loads((tmp_path / "sweeps" / name / "compare.json").read_text(encoding="utf-8"))
        assert [entry["name"] for entry in data["contenders"]] == labels
        assert [entry["same_text"] for entry in data["contenders"]] == [None, True, True]
        assert f"sweep over {name}" in out


def test_a_sweep_over_text_has_a_measure_for_each_value(compare: Compare):
    code, out, _ = compare(
        "--sweep", "theta=1.0,1.5", "--sweep", "prompt=3,6", "-n", "30", "--seeds", "1", "--json"
    )
    assert code == 0
    thetas, prompts = (json.loads(line) for line in out.splitlines())
    names = [(entry["name"], entry["reference"], entry["same_text"]) for entry in thetas["contenders"]]
    assert names == [
        ("ar, theta=1.0", None, None), ("theta=1.0", "ar, theta=1.0", True),
        ("ar, theta=1.5", None, None), ("theta=1.5", "ar, theta=1.5", True),
    ]  # fmt: skip
    hashes = [entry["runs"][0]["token_ids_sha256"] for entry in thetas["contenders"]]
    assert hashes[0] != hashes[2]
    assert [entry["num_prompt_tokens"] for entry in prompts["contenders"]] == [3, 3, 6, 6]


@dataclass
class Seen:
    """What ran in a comparison: engines as they began to write, and how many models were loaded for it."""

    engines: list[dict[str, Any]] = field(default_factory=list)
    models: list[weakref.ref[Any]] = field(default_factory=list)

    def all(self, what: str) -> list[Any]:
        """Of every engine in turn, each value once for the neighbours that share it."""
        return [value for value, _ in itertools.groupby(engine[what] for engine in self.engines)]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen = Seen()
    stream, load_weights = swiftgen.engine.Engine.stream, swiftgen.engine.load_weights

    def seen_stream(self: Any, prompt: Any, **options: Any) -> Any:
        events = stream(self, prompt, **options)
        heads = self._prepared.heads
        seen.engines.append(
            {
                "dtype": self.loaded.dtype,
                "weights": next(self.loaded.model.parameters()).dtype,
                "arithmetic": self.arithmetic["dtype"],
                "attention": self.arithmetic["attention"],
                "heads": heads and type(heads.heads).__name__,
                "positions": self.loaded.max_positions,
                "prompt": self.tokenizer.decode(prompt),
            }
        )
        return events

    def seen_load(*args: Any) -> Any:
        assert not any(model() for model in seen.models), "the one before is still in memory"
        loaded = load_weights(*args)
        seen.models.append(weakref.ref(loaded.model))
        return loaded

    monkeypatch.setattr(swiftgen.engine.Engine, "stream", seen_stream)
    monkeypatch.setattr(swiftgen.engine, "load_weights", seen_load)
    return seen


class TestSweepsTakeEffect:
    """Each kind of setting: what is loaded, what is drafted with, what is continued, and the rest."""

    OPTIONS = ("-n", "20", "--seeds", "1")

    @pytest.fixture
    def sweep(self, compare: Compare) -> Callable[..., dict[str, Any]]:
        """What is told of a sweep, as compare.json holds it."""

        def run(text: str, *options: str) -> dict[str, Any]:
            code, out, err = compare(*self.OPTIONS, "--json", "--sweep", text, *options)
            assert code == 0, err
            data: dict[str, Any] = json.loads(out)
            for entry in data["contenders"]:
                assert entry["same_text"] is (True if entry["reference"] else None)
            return data

        return run

    def test_dtype(self, sweep: Callable[..., dict[str, Any]], seen: Seen):
        data = sweep("model.dtype=float32,bfloat16")
        assert seen.all("dtype") == seen.all("weights") == [torch.float32, torch.bfloat16]
        assert seen.all("arithmetic") == ["float32", "bfloat16"]
        assert data["machine"]["dtype"] == "float32, bfloat16"
        assert [(entry["name"], entry["reference"]) for entry in data["contenders"]] == [
            ("ar, model.dtype=float32", None),
            ("model.dtype=float32", "ar, model.dtype=float32"),
            ("ar, model.dtype=bfloat16", None),
            ("model.dtype=bfloat16", "ar, model.dtype=bfloat16"),
        ]
        assert len(seen.models) == 2

    @pytest.mark.skipif(not kernels_for("auto", CPU, torch.float32, 64), reason="there are no native kernels")
    def test_attention(self, sweep: Callable[..., dict[str, Any]], seen: Seen):
        sweep("model.attention=sdpa,native")
        first, second = seen.all("attention")
        assert (first, second.partition(" ")[0]) == ("cpu_prefix", "native")
        assert len(seen.models) == 2

    def test_heads(self, sweep: Callable[..., dict[str, Any]], seen: Seen, tmp_path: Path):
        for kind, options in (("linear", {}), ("recurrent", {"width": 16})):
            heads = new_heads(
                kind, HIDDEN_SIZE, 3, 1e-6, vocabulary=torch.arange(0, VOCAB_SIZE, 2), **options
            )
            save_heads(heads, tmp_path / kind, HeadsInfo(base_model="tiny", vocab_size=VOCAB_SIZE))
        sweep(f"heads=null,{tmp_path / 'linear'},{tmp_path / 'recurrent'}")
        assert seen.all("heads") == [None, "LinearHeads", "RecurrentHeads"]
        assert len(seen.models) == 3

    def test_chat(self, sweep: Callable[..., dict[str, Any]], seen: Seen):
        data = sweep("chat=false,true")
        assert {engine["prompt"] for engine in seen.engines} == {PROMPT[1], f"[user]{PROMPT[1]}[assistant]"}
        raw, _, chat, _ = data["contenders"]
        assert raw["num_prompt_tokens"] < chat["num_prompt_tokens"] == data["num_prompt_tokens"]
        assert len(seen.models) == 1

    def test_system(self, sweep: Callable[..., dict[str, Any]], seen: Seen):
        sweep("system=null,Be brief.", "--chat")
        assert {engine["prompt"] for engine in seen.engines} == {
            f"[user]{PROMPT[1]}[assistant]",
            f"[system]Be brief.[user]{PROMPT[1]}[assistant]",
        }
        assert len(seen.models) == 1

    def test_what_cannot_be_loaded_is_left_out(self, sweep: Callable[..., dict[str, Any]], seen: Seen):
        data = sweep("long_context=yarn,error", "-n", str(MAX_POSITIONS))
        assert seen.all("positions") == [2 * MAX_POSITIONS]
        assert len(seen.models) == 1  # the warm-up, which is shorter, has none of its own
        assert list(data["failures"]) == ["ar, long_context=error", "long_context=error"]
        assert "positions" in data["failures"]["long_context=error"]

    def test_nothing_is_measured_if_the_first_cannot_be_loaded(self, compare: Compare, seen: Seen):
        code, out, err = compare(
            "--sweep", "long_context=error,yarn", *self.OPTIONS, "-n", str(MAX_POSITIONS)
        )
        assert (code, out) == (2, "")
        assert f"the model has {MAX_POSITIONS}" in err
        assert not seen.engines

    def test_the_rest_shares_one_model(self, compare: Compare, seen: Seen):
        sweeps = (
            "theta=1.0,1.5",
            "draft=ngram,self",
            "budget=32,64",
            "sampler.min_p=0,0.5",
            "alphabet=any,latin",
        )
        options = [option for text in sweeps for option in ("--sweep", text)]
        assert compare(*options, *self.OPTIONS)[0] == 0
        assert len(seen.models) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-b", "gpt"], "unknown baseline 'gpt'"),
        (["-n", "0"], "--tokens is 0"),
        (["--seeds", "1,x"], "--seeds is '1,x'"),
        (["--seeds", "1,1"], "different whole numbers"),
        (["--seeds", "-1"], "different whole numbers"),
        (["--sweep", "k=1"], "has no effect"),
        (["--sweep", "theta=-1"], "theta is -1"),
        (["--sweep", "name=a,b"], "name cannot be swept"),
        (["--sweep", "theta=1", "-b", "hf"], "measured against ar alone"),
        (["--sweep", "prompt=99999"], "the prompt has"),
        (["-b", "vllm"], "no baseline is left"),
        (["-b", "llama.cpp"], "no baseline is left"),
    ],
)
def test_bad_input(compare: Compare, options: list[str], message: str):
    code, out, err = compare("-n", "20", *options)
    assert code == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_the_folder_is_not_overwritten_unless_asked(compare: Compare, tmp_path: Path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine", encoding="utf-8")
    (tmp_path / "file").write_text("", encoding="utf-8")
    for name, message in (("full", "exists and is not empty"), ("file", "is a file")):
        code, _, err = compare("-o", str(tmp_path / name), "-n", "5")
        assert (code, message in err) == (2, True)
    assert compare("-o", str(tmp_path / "full"), "--force", "-n", "5", "--seeds", "1")[0] == 0
    assert (tmp_path / "full" / "mine.txt").read_text(encoding="utf-8") == "mine"


def test_without_matplotlib_there_is_a_report_without_plots(
    compare: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = compare("-o", str(tmp_path / "report"), "-n", "5", "--seeds", "1")
    assert code == 0
    assert "no plots: plots need matplotlib: pip install 'swiftgen[plots]'" in err
    assert "Not drawn" in (tmp_path / "report" / "report.html").read_text(encoding="utf-8")


def test_an_interrupt_keeps_the_runs_that_are_done(
    compare: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    original = swiftgen.engine.Engine.stream
    calls = itertools.count()

    def interrupted(self: Any, *args: Any, **options: Any) -> Any:
        if next(calls) == 5:  # two warm-ups, three runs
            raise KeyboardInterrupt
        return original(self, *args, **options)

    monkeypatch.setattr(swiftgen.engine.Engine, "stream", interrupted)
    code, _, err = compare("-o", str(tmp_path / "report"), "-n", "20", "--seeds", "1,2,3")
    assert code == 130
    assert "interrupted: 3 runs are in the figures" in err
    data = json.loads((tmp_path / "report" / "compare.json").read_text(encoding="utf-8"))
    assert [len(entry["runs"]) for entry in data["contenders"]] == [1, 2]


class FakeLlama:
    """llama_cpp.Llama 0.3: the arguments that are used, with the names and meanings it documents."""

    made: Any = None

    def __init__(
        self,
        *,
        model_path: str,
        n_ctx: int,
        n_threads: int,
        n_threads_batch: int,
        n_gpu_layers: int,
        flash_attn: bool,
        last_n_tokens_size: int,
        verbose: bool,
    ) -> None:
        self.options = dict(locals())
        FakeLlama.made = self

    def set_seed(self, seed: int) -> None:
        self.seed = seed

    def reset(self) -> None: ...

    def generate(
        self,
        tokens: Sequence[int],
        *,
        top_k: int,
        top_p: float,
        min_p: float,
        temp: float,
        repeat_penalty: float,
    ) -> Any:
        self.sampling = (top_k, top_p, min_p, temp, repeat_penalty)
        return itertools.count(sum(tokens) + self.seed)


def fake_engine(device: str = "cpu", **settings: Any) -> Any:
    from swiftgen.settings.presets import load_preset

    preset = load_preset(None, {"W": 512, "theta": 1.25, "sampler.top_k": 0, **settings})
    opened = SimpleNamespace(device=torch.device(device), dtype=torch.bfloat16, folder=Path("model"))
    return SimpleNamespace(preset=preset, opened=opened)


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, module)


def written_by(run: Any, num_tokens: int, seed: int) -> list[int]:
    events: list[StepEvent] = []
    run([1, 2, 3], num_tokens, seed, events.append)
    assert events[-1].context_tokens == 3 + num_tokens
    return [token for e in events for token in e.token_ids]


def test_llama_cpp_gets_prompt_sampler_and_length(monkeypatch: pytest.MonkeyPatch):
    fake_module(monkeypatch, "llama_cpp", Llama=FakeLlama)
    resolved = SimpleNamespace(kind="gguf", path=Path("weights.Q4_1.gguf"))
    monkeypatch.setattr(foreign, "resolve_source", lambda model: resolved)
    run, notes = foreign.llama_cpp_run(fake_engine(), 100)
    assert written_by(run, 5, 7) == [13, 14, 15, 16, 17]
    made = FakeLlama.made
    assert made.options["n_ctx"] >= 100
    assert made.options["last_n_tokens_size"] == 512
    assert made.options["model_path"] == "weights.Q4_1.gguf"
    sampler = fake_engine().preset.sampler
    assert made.sampling == (0, 1.0, sampler.min_p, sampler.temperature, 1.25)
    assert "computes with the file's own Q4_1 weights" in notes
    assert "alphabet is not applied" in notes


def test_a_program_that_is_broken_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "llama_cpp.py").write_text("import no_such_part", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SwiftgenError, match=r"llama.cpp cannot be loaded: .*no_such_part"):
        foreign.llama_cpp_run(fake_engine(), 100)


def test_llama_cpp_reads_gguf_only(monkeypatch: pytest.MonkeyPatch):
    fake_module(monkeypatch, "llama_cpp", Llama=FakeLlama)
    monkeypatch.setattr(
        foreign, "resolve_source", lambda model: SimpleNamespace(kind="folder", path=Path("x"))
    )
    with pytest.raises(SwiftgenError, match="GGUF files only"):
        foreign.llama_cpp_run(fake_engine(), 100)


class FakeVllmEngine:
    """vLLM's LLMEngine: requests are added, and every step tells all tokens so far."""

    def add_request(self, request_id: str, prompt: dict[str, list[int]], params: Any) -> None:
        self.first, self.params, self.done = sum(prompt["prompt_token_ids"]), params, 0

    def has_unfinished_requests(self) -> bool:
        return self.done < self.params.max_tokens

    def step(self) -> list[Any]:
        self.done = min(self.done + 2, self.params.max_tokens)
        token_ids = list(range(self.first, self.first + self.done))
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=token_ids)])]


def test_vllm_gets_prompt_sampler_and_length(monkeypatch: pytest.MonkeyPatch):
    engine = FakeVllmEngine()
    options: dict[str, Any] = {}

    def llm(**given: Any) -> Any:
        options.update(given)
        return SimpleNamespace(llm_engine=engine)

    fake_module(monkeypatch, "vllm", LLM=llm, SamplingParams=lambda **given: SimpleNamespace(**given))
    run, notes = foreign.vllm_run(fake_engine("cuda"), 100)
    assert written_by(run, 5, 7) == [6, 7, 8, 9, 10]
    assert options["dtype"] == "bfloat16"
    assert options["max_model_len"] == 100
    assert engine.params.ignore_eos
    assert engine.params.top_k == -1
    assert engine.params.repetition_penalty == 1.25
    assert any("whole context" in note for note in notes)
