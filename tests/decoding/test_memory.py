"""What runs have learnt, in the cache folder: kept, read, and never trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import swiftgen
from swiftgen.decoding import memory
from swiftgen.decoding.drafters.self_draft import SOURCE
from swiftgen.decoding.estimates import Known
from swiftgen.decoding.memory import memory_file
from swiftgen.engine import Engine

PROMPT = [5, 17, 3, 5, 17, 8, 60]
KNOWN = Known({7: {"1": 0.5, "base": 0.25}}, {("base", 1, -2): 0.5}, {"base": 0.75})


def text_of(engine: Engine, num_tokens: int = 60) -> list[int]:
    return [token for event in engine.stream(PROMPT, num_tokens=num_tokens) for token in event.token_ids]


def files() -> list[Path]:
    return sorted(Path(memory.FOLDER).glob("*"))


def test_what_is_written_is_read(tmp_path: Path):
    file = tmp_path / "folder" / "kept.json"
    memory._write(file, KNOWN)
    assert memory._read(file) == KNOWN
    assert [path.name for path in file.parent.iterdir()] == ["kept.json"]


@pytest.mark.parametrize(
    "changes",
    [
        {"costs": {"7": {"1": 0.0}}},
        {"costs": {"7": {"1": "soon"}}},
        {"costs": {"7": {"1": float("nan")}}},
        {"costs": {"short": {"1": 1.0}}},
        {"costs": []},
        {"acceptance": {"base 1": 0.5}},
        {"acceptance": {"base 1 0": 1.5}},
        {"acceptance": {"base 1 0": None}},
        {"hits": {"base": -1}},
        {"hits": None},
    ],
)
def test_a_file_of_another_kind_is_ignored(tmp_path: Path, changes: dict[str, Any]):
    file = tmp_path / "kept.json"
    memory._write(file, KNOWN)
    file.write_text(json.dumps(json.loads(file.read_text()) | changes), encoding="utf-8")
    assert memory._read(file) == Known()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b" " * 2_000_000]
)
def test_a_damaged_file_is_ignored(tmp_path: Path, content: bytes):
    file = tmp_path / "kept.json"
    file.write_bytes(content)
    assert memory._read(file) == Known()


def test_no_file_and_no_room_for_one_are_no_errors(tmp_path: Path):
    assert memory._read(tmp_path / "none.json") == Known()
    (tmp_path / "file").write_text("in the way")
    memory._write(tmp_path / "file" / "kept.json", KNOWN)


@pytest.mark.usefixtures("even_passes")
class TestRuns:
    def test_a_run_begins_with_what_the_one_before_knew(self, preset_file: Path):
        engine = swiftgen.load(str(preset_file), {"draft": "self"})
        text = text_of(engine)
        (file,) = files()
        known = memory._read(file)
        assert SOURCE in known.hits
        assert any(source == SOURCE for source, _, _ in known.acceptance)
        engine.prepare(1, 1)
        estimates = memory.recalled(file, engine._prepared)
        assert estimates.known() == known
        assert text_of(engine) == text

    def test_the_text_does_not_depend_on_it(self, preset_file: Path):
        engine = swiftgen.load(str(preset_file), {"draft": "self"})
        text = text_of(engine)
        (file,) = files()
        for hit in (0.0, 1.0):
            memory._write(file, Known({7: {"1": 1e-9, "base": 1e9}}, {("base", 1, 0): hit}, {"base": hit}))
            assert text_of(engine) == text
        file.write_text("{")
        assert text_of(engine) == text

    def test_a_run_that_is_stopped_leaves_what_it_has_learnt(self, preset_file: Path):
        events = swiftgen.load(str(preset_file), {"draft": "self"}).stream(PROMPT, num_tokens=60)
        for _ in range(5):
            next(events)
        assert not files()
        events.close()  # type: ignore[attr-defined]
        assert len(files()) == 1

    def test_the_paper_s_plan_neither_reads_nor_writes_it(self, preset_file: Path):
        text_of(swiftgen.load(str(preset_file), {"draft": "paper"}))
        assert not files()

    def test_other_settings_of_the_drafts_have_a_file_of_their_own(self, preset_file: Path):
        engine = swiftgen.load(str(preset_file))
        engine.prepare(1, 1)
        first, second, third, same = (
            memory_file(engine._prepared, engine.preset.model_copy(update=update))
            for update in ({"kv_budget": 32}, {"refresh": "recent"}, {"theta": 1.3}, {"k": 7})
        )
        assert len({first, second, third, same}) == 4
        assert same == memory_file(engine._prepared, engine.preset)
