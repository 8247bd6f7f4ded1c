"""What the version before wrote still works: documents, a preset, draft heads.

tests/data/previous was written by version 0.1.0 before its modules were moved into folders, with a random
model: `whole` without drafts; `ngram` and `heads`, the same text by the plans of these names, are cut short.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.documents import change_manifest
from swiftgen.cli.app import main
from swiftgen.document.document import read_tokens, run_folder
from swiftgen.document.manifest import read_manifest
from swiftgen.document.recorded import read_run
from swiftgen.settings.presets import load_preset

PREVIOUS = Path(__file__).parent / "data" / "previous"
PROMPT = "the hen saw the heron. the hen saw the"
OF_THE_MACHINE = {"torch", "linears", "fused_layers", "pass_sizes"}
"""Arithmetic that another machine may do otherwise; the text hardly ever shows it."""
WHOLE = Path("whole.txt")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of it all is where commands run."""
    shutil.copytree(PREVIOUS, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def is_exact(path: Path, num_tokens: int, capsys: pytest.CaptureFixture[str]) -> bool:
    capsys.readouterr()
    code = main(["verify", "-q", str(path)])
    lines = capsys.readouterr().out.splitlines()
    return code == 0 and lines[:2] == [
        f"{num_tokens} of {num_tokens} tokens are exactly what plain decoding writes",
        "the text file is the decoding of the token log",
    ]


def test_a_complete_document_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    assert is_exact(WHOLE, 200, capsys)


@pytest.mark.parametrize(("name", "num_tokens"), [("ngram", 63), ("heads", 44)])
def test_a_stopped_document_is_exact_and_goes_on(
    name: str, num_tokens: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(f"{name}.txt")
    if name == "heads":  # their place was another
        change_manifest(path, lambda data: data["preset"].update(heads=str(tmp_path / "heads")))
    before = read_manifest(run_folder(path)).arithmetic
    assert is_exact(path, num_tokens, capsys)
    assert main(["resume", "-q", "--anyway", str(path)]) == 0
    after = read_manifest(run_folder(path))
    assert after.arithmetic.keys() == before.keys()
    assert {difference.split()[0] for difference in after.continued[0].differences} <= OF_THE_MACHINE
    assert path.read_bytes() == WHOLE.read_bytes()
    assert read_tokens(run_folder(path)) == read_tokens(run_folder(WHOLE))
    assert is_exact(path, 200, capsys)


def test_activations_of_a_document_stay_as_they_were() -> None:
    run = read_run(WHOLE)
    assert "activations" not in run.manifest.preset["model"]
    assert run.preset().model.activations == "full"
    assert load_preset("./tiny.yaml").model.activations == "auto"
    change_manifest(WHOLE, lambda data: data["preset"]["model"].update(activations="int8"))
    assert read_run(WHOLE).preset().model.activations == "int8"


def test_a_preset_and_its_heads_write_the_same_text() -> None:
    command = ["write", "-q", "--preset", "./tiny.yaml", "-n", "200", "--seed", "5", "-p", PROMPT]
    for name, draft in (("as-it-is.txt", []), ("by-heads.txt", ["--draft", "heads"])):
        assert main([*command, *draft, "-o", name]) == 0
        assert Path(name).read_bytes() == WHOLE.read_bytes()
