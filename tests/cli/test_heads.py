"""`train-heads` and `heads` on a tiny model in a folder: trained, stopped, continued, judged, used."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import swiftgen
from swiftgen.cli.app import main
from swiftgen.decoding.planner import Planner
from swiftgen.heads.files import WEIGHTS_FILE, HeadsInfo, load_heads, save_heads
from swiftgen.system.errors import EXIT_INTERRUPTED
from swiftgen.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("module_cache")

WORDS = ["hen", "heron", "saw", "the", "a", "ran", "sea", "old", "map", "and"]
STEPS = ["--steps", "20", "--warmup", "5", "--batch-size", "3", "--learning-rate", "0.01"]
SIZES = ["--sequence-length", "48", "--width", "16", "--quiet", "--held-out", "0.2"]


@pytest.fixture(scope="module")
def novel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text that can be learnt: the same few sentences in changing order."""
    rng = random.Random(1)
    sentences = [" ".join(rng.choices(WORDS, k=6)) + "." for _ in range(4)]
    file = tmp_path_factory.mktemp("data") / "novel.txt"
    file.write_text(" ".join(rng.choices(sentences, k=120)), encoding="utf-8")
    return file


@pytest.fixture
def train(preset_file: Path, novel: Path, tmp_path: Path):  # type: ignore[no-untyped-def]
    def run(*options: str, data: str | Path = novel, folder: str = "out") -> int:
        files = ["--preset", str(preset_file), "--data", str(data), "-o", str(tmp_path / folder)]
        return main(["train-heads", *files, *SIZES, *STEPS, *options])

    return run


def losses(folder: Path) -> list[float]:
    with (folder / "losses.csv").open() as file:
        return [sum(float(v) for k, v in row.items() if k.startswith("loss")) for row in csv.DictReader(file)]


def test_training_on_a_small_text_learns_and_leaves_heads_that_draft(
    train,
    tmp_path: Path,
    preset_file: Path,
    capsys,
    monkeypatch: pytest.MonkeyPatch,
):
    assert train("--steps", "60", "--hard") == 0
    folder = tmp_path / "out"
    table = capsys.readouterr().out
    assert "tokens per step, replayed with heads alone" in table
    found = losses(folder)
    assert len(found) == 60
    assert sum(found[-5:]) < 0.9 * sum(found[:5])
    judgement = json.loads((folder / "judgement.json").read_text())
    assert sum(judgement["losses"]) * 5 < sum(found[:5])  # held-out text too
    heads, info = load_heads(folder)
    assert (heads.kind, heads.num_heads, info.num_steps) == ("recurrent", 3, 60)
    assert next(heads.parameters()).dtype == torch.bfloat16  # as it lies in the file

    assert judgement["tokens_per_step"] > 1
    # A pass of a tiny model takes less time than to draft: here all drafts are worth it.
    for margin in ("ENTER", "STAY"):
        monkeypatch.setattr(f"swiftgen.decoding.planner.{margin}", float("-inf"))
    monkeypatch.setattr(Planner, "_best_subtree", lambda self, tree, estimates: tree)
    texts = []
    for overrides in ({"draft": "none"}, {"draft": "heads", "heads": str(folder)}):
        engine = swiftgen.load(str(preset_file), overrides)
        events = list(engine.stream("The hen saw", num_tokens=60, seed=1))
        texts.append([token for event in events for token in event.token_ids])
    assert texts[0] == texts[1]
    assert sum("heads" in event.sources for event in events) > 0


@pytest.mark.parametrize("kind", ["linear", "recurrent"])
def test_a_training_that_was_interrupted_ends_with_the_same_weights(
    train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
):
    assert train("--kind", kind, "--checkpoint-every", "6", folder="whole") == 0
    run = Trainer.run

    def interrupted(self: Trainer):  # type: ignore[no-untyped-def]
        for report in run(self):
            yield report
            if report.step == 9:
                raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "run", interrupted)
    assert train("--kind", kind) == EXIT_INTERRUPTED
    monkeypatch.setattr(Trainer, "run", run)
    assert train("--kind", kind) == 2  # not by mistake over what is there
    assert train("--kind", kind, "--resume") == 0
    whole, continued = (load_file(tmp_path / name / WEIGHTS_FILE) for name in ("whole", "out"))
    for name, tensor in whole.items():
        assert torch.equal(continued[name], tensor), name
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")


def test_a_training_that_was_killed_goes_on_from_its_last_checkpoint(
    train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Killed(BaseException):
        pass

    assert train(folder="whole") == 0
    run, save = Trainer.run, Trainer.save

    def killed(self: Trainer):  # type: ignore[no-untyped-def]
        for report in run(self):
            yield report
            if report.step == 9:
                monkeypatch.setattr(Trainer, "save", lambda *_: None)  # a killed process saves nothing more
                raise Killed

    monkeypatch.setattr(Trainer, "run", killed)
    with pytest.raises(Killed):
        train("--checkpoint-every", "4")
    monkeypatch.setattr(Trainer, "run", run)
    monkeypatch.setattr(Trainer, "save", save)
    assert train("--resume") == 0
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")
    whole, continued = (load_file(tmp_path / name / WEIGHTS_FILE) for name in ("whole", "out"))
    assert all(torch.equal(continued[name], tensor) for name, tensor in whole.items())


def test_the_model_writes_its_own_texts(train, tmp_path: Path):
    options = ["--max-sequences", "6", "--self-batch", "4", "--vocabulary", "40"]
    assert train(*options, data="self") == 0
    heads, info = load_heads(tmp_path / "out")
    assert info.data == "288 tokens: written by tiny itself"
    assert heads.vocabulary is not None
    assert len(heads.vocabulary) == 40
    assert not list((tmp_path / "out").glob("self.*"))
    # The same texts for other heads, without writing them again.
    texts = tmp_path / "out" / "texts.safetensors"
    assert train("--kind", "linear", data=texts, folder="linear") == 0
    assert not (tmp_path / "linear" / "texts.safetensors").exists()


def test_a_dry_run_says_what_it_takes_and_writes_nothing(train, tmp_path: Path, capsys):
    assert train("--dry-run") == 0
    plan = capsys.readouterr().out
    for word in ("texts", "steps    20, which see 2,880 tokens", "memory", "time"):
        assert word in plan
    assert train("--dry-run", "--max-sequences", "100", data="self") == 0
    assert "100 with 4,800 tokens" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_heads_are_shown_and_judged(train, tmp_path: Path, novel: Path, preset_file: Path, capsys):
    assert train() == 0
    capsys.readouterr()
    assert main(["heads", "show", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "recurrent, width 16" in shown
    assert "novel.txt" in shown
    options = ["--preset", str(preset_file), "--data", str(novel), "--sequence-length", "48", "--json"]
    assert main(["heads", "eval", str(tmp_path / "out"), *options]) == 0
    judged = json.loads(capsys.readouterr().out)
    assert judged["num_positions"] > 100
    assert judged["tokens_per_step"] >= 1


@pytest.mark.parametrize(
    ("options", "data", "message"),
    [
        ([], "nowhere.txt", "there is no file or folder nowhere.txt"),
        (["--kind", "cubic"], None, "unknown kind of heads 'cubic'"),
        (["--resume"], None, "has no checkpoint"),
        (["--sequence-length", "100000"], None, "the model has"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    train, tmp_path: Path, capsys, options: list[str], data: str | None, message: str
):
    arguments = {} if data is None else {"data": data}
    assert train(*options, **arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not list(tmp_path.glob("out/*.safetensors"))


def test_too_little_text_is_a_clear_error(train, tmp_path: Path, capsys):
    (tmp_path / "empty.txt").write_text("")
    assert train(data=tmp_path / "empty.txt") == 2
    assert "no text of 48 tokens or more" in capsys.readouterr().err


def test_heads_of_another_model_are_refused(train, tmp_path: Path, preset_file: Path, capsys):
    assert train() == 0
    heads, _ = load_heads(tmp_path / "out")
    save_heads(heads, tmp_path / "other", HeadsInfo(base_model="other/model", vocab_size=7))
    capsys.readouterr()
    data = str(tmp_path / "out" / "texts.safetensors")
    arguments = ["heads", "eval", str(tmp_path / "other"), "--data", data, "--preset", str(preset_file)]
    assert main(arguments) == 2
    assert "are for 7 tokens" in capsys.readouterr().err
