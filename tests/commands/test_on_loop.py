"""Loops while writing: the display, and `--on-loop` with a tiny model that goes round in a circle."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from support.commands import Outcome
from support.model_files import tiny_model, tiny_tokenizer
from support.terminals import INFO, Clock, frame, step, terminal, written
from swiftgen.cli.app import main
from swiftgen.display.panel import LinePrinter, LivePanel
from swiftgen.display.wording import loop_words
from swiftgen.document.document import STEPS_NAME, read_tokens, run_folder
from swiftgen.document.manifest import read_manifest
from swiftgen.figures.loops import MIN_REPEATED_TOKENS, Loop
from swiftgen.figures.metrics import RunMetrics

pytestmark = pytest.mark.usefixtures("module_cache")

NUM_TOKENS = 200

Write = Callable[..., Outcome]


@pytest.fixture(scope="module")
def circling_preset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A preset for a random model that looks at nothing but the last token, without noise or penalty."""
    folder = tmp_path_factory.mktemp("models") / "circling"
    model = tiny_model(initializer_range=0.25, max_position_embeddings=512)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    file = folder.parent / "circling.yaml"
    file.write_text(
        f"""
name: circling
model:
  source: {folder}
  dtype: float32
  device: cpu
theta: 1.0
sampler:
  temperature: 0.0
chat: false
""",
        encoding="utf-8",
    )
    return file


@pytest.fixture
def write(
    circling_preset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Write:
    """Writes book.txt in a folder of its own; other commands by their name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    fixed = ["--preset", str(circling_preset), "-n", str(NUM_TOKENS), "-p", "The sea.", "-o", "book.txt"]

    def run(*options: str, command: str = "write") -> Outcome:
        capsys.readouterr()
        code = main([command, *fixed, "--force", *options] if command == "write" else [command, *options])
        return Outcome(code, *capsys.readouterr())

    return run


def tokens_of_the_book() -> list[int]:
    folder = run_folder(Path("book.txt"))
    return read_tokens(folder)[read_manifest(folder).num_prompt_tokens :]


def loop_of(token_ids: list[int]) -> tuple[int, int]:
    """Period and start of the run at the end of a text, by trying all."""
    ends = []
    for period in range(1, len(token_ids) // 2):
        begin = len(token_ids) - period
        while begin and token_ids[begin - 1] == token_ids[begin - 1 + period]:
            begin -= 1
        ends.append((begin, period))
    start, period = min(ends)
    return period, start


# --- write -------------------------------------------------------------------------------------------


def test_a_loop_is_warned_of_once_and_the_text_goes_on(write: Write) -> None:
    result = write("--json")
    token_ids = tokens_of_the_book()
    period, start = loop_of(token_ids)
    words = f"loop of {period} tokens since token {start}"
    assert (result.code, len(token_ids)) == (0, NUM_TOKENS)
    assert result.err.splitlines().count(f"warning: {words}") == 1
    assert f"1 found · {words} · {NUM_TOKENS - start - period} repeated" in result.err
    data = json.loads(result.out)
    assert data["loop"] == data["longest_loop"]
    assert data["loop"] == {"period": period, "start": start, "num_repeated": NUM_TOKENS - start - period}
    assert (data["num_loops"], data["stop_reason"]) == (1, "length")


@pytest.mark.parametrize("draft", ["none", "auto"])
def test_a_run_can_end_in_a_loop_and_be_resumed(write: Write, draft: str) -> None:
    assert write("-q").code == 0
    whole, text = tokens_of_the_book(), Path("book.txt").read_text("utf-8")
    period, start = loop_of(whole)
    result = write("--on-loop", "stop", "--draft", draft, "--json")
    token_ids = tokens_of_the_book()
    assert start + period + MIN_REPEATED_TOKENS <= len(token_ids) < NUM_TOKENS
    assert token_ids == whole[: len(token_ids)]
    assert result.code == 0
    kept = f"{len(token_ids)} of 200 tokens are written to book.txt"
    assert f"stopped in a loop of {period} tokens since token {start}: {kept}\n" in result.err
    assert "warning" not in result.err
    assert "Traceback" not in result.err
    assert json.loads(result.out)["stop_reason"] == "loop"
    manifest = read_manifest(run_folder(Path("book.txt")))
    assert (manifest.status, manifest.stop_reason) == ("stopped", "loop")
    assert write("-q", "book.txt", command="verify").code == 0
    resumed = write("book.txt", command="resume")
    assert resumed.code == 0
    assert resumed.err.count("warning: loop of") == 1
    assert (tokens_of_the_book(), Path("book.txt").read_text("utf-8")) == (whole, text)


def test_a_resumed_run_ends_in_a_new_loop_and_goes_on_in_a_known_one(write: Write) -> None:
    assert write("-q").code == 0
    whole = tokens_of_the_book()
    assert write("-q", "--on-loop", "stop", "--draft", "none").code == 0
    stopped = tokens_of_the_book()
    assert write("-q", "--draft", "none", "-n", str(len(stopped) - 9)).code == 0
    longer = ["-q", "book.txt", "--tokens", str(NUM_TOKENS), "--on-loop", "stop"]
    result = write(*longer, command="resume")
    assert (result.code, result.err.splitlines()[0].split(":")[0][:15]) == (0, "stopped in a lo")
    assert tokens_of_the_book() == stopped
    assert write(*longer, command="resume") == Outcome(0, "", "")
    assert tokens_of_the_book() == whole


def test_a_resumed_run_can_ignore_a_loop(write: Write) -> None:
    assert write("-q", "--on-loop", "stop").code == 0
    result = write("book.txt", "--on-loop", "ignore", "--json", command="resume")
    assert (result.code, "warning" in result.err, json.loads(result.out)["num_loops"]) == (0, False, 0)


def test_a_loop_can_be_ignored(write: Write) -> None:
    result = write("--on-loop", "ignore", "--json")
    assert (result.code, len(tokens_of_the_book())) == (0, NUM_TOKENS)
    assert "loop" not in result.err
    data = json.loads(result.out)
    assert (data["loop"], data["num_loops"], data["longest_loop"]) == (None, 0, None)


def test_a_text_that_is_complete_in_the_step_that_finds_a_loop_is_complete(write: Write) -> None:
    assert write("-q", "--on-loop", "stop", "--draft", "none").code == 0
    num_tokens = len(tokens_of_the_book())
    assert write("-q", "--on-loop", "stop", "--draft", "none", "-n", str(num_tokens)) == Outcome(0, "", "")
    assert read_manifest(run_folder(Path("book.txt"))).status == "complete"


def test_quiet_says_no_more_than_that_the_run_has_ended(write: Write) -> None:
    assert write("-q") == Outcome(0, "", "")
    result = write("-q", "--on-loop", "stop")
    assert [line.split()[0] for line in result.err.splitlines()] == ["stopped", "go"]


def test_another_word_is_refused(write: Write) -> None:
    refused = Outcome(2, "", "error: --on-loop is 'halt'\nhint: allowed are warn, stop, ignore\n")
    assert write("--on-loop", "halt") == refused
    assert write("book.txt", "--on-loop", "halt", command="resume") == refused


def test_the_figures_on_disk_have_the_loop(write: Write) -> None:
    write("-q")
    record = json.loads((run_folder(Path("book.txt")) / STEPS_NAME).read_text("utf-8").splitlines()[-1])
    assert record["num_loops"] == 1


# --- the display -------------------------------------------------------------------------------------


def test_the_panel_shows_the_loop_as_long_as_it_lasts() -> None:
    clock = Clock()
    panel, metrics = LivePanel(terminal(80, 24), clock), RunMetrics(clock)
    panel.start(INFO)
    cycle = random.Random(0).sample(range(1_000), 300)
    for token_ids, is_shown in [(range(2_000, 14_345), False), (cycle * 3, True), ([1_001], False)]:
        clock.now_s += 1
        event = step("x", token_ids, sources=())
        metrics.observe(event)
        panel.step(event, metrics)
        shown = "\n".join(frame(panel, 80))
        assert ("loop of 300 tokens since token 12,345" in shown) is is_shown
    panel.close()
    assert metrics.loop is None
    assert metrics.snapshot().longest_loop == Loop(300, 12_345, 600)


def test_the_panel_fits_with_a_loop_in_it() -> None:
    clock = Clock()
    for height in (8, 12, 15, 18, 24):
        panel, metrics = LivePanel(terminal(80, height), clock), RunMetrics(clock)
        panel.start(INFO)
        clock.now_s += 1
        event = step("a\nb\nc\nd\ne\nf\ng", [1] * 100)
        metrics.observe(event)
        panel.step(event, metrics)
        lines = frame(panel, 80)
        assert len(lines) < height
        assert height < 12 or lines[-1].startswith("──")
        panel.close()


def test_every_loop_is_one_line_in_a_log_and_the_longest_is_in_the_summary() -> None:
    console = Console(file=io.StringIO(), width=100)
    lines, metrics = LinePrinter(console, every_s=10, clock=Clock()), RunMetrics(Clock())
    lines.start(INFO)
    for token_id in [5] * 80 + [6, 7] * 60 + [8, 9, 10] * 30:
        event = step("", [token_id])
        metrics.observe(event)
        lines.step(event, metrics)
    assert [line for line in written(console).splitlines() if "loop" in line] == [
        "warning: loop of 1 token since token 0",
        "warning: loop of 2 tokens since token 80",
        "warning: loop of 3 tokens since token 200",
    ]
    lines.finish(metrics.snapshot(), "loop")
    assert "3 found · the longest: loop of 2 tokens since token 80 · 118 repeated" in written(console)
    assert "stopped in a loop" in written(console)


def test_a_run_that_goes_on_knows_what_is_written() -> None:
    metrics = RunMetrics(written=[1, 2, 3, 4] * 30)
    assert metrics.loop == Loop(4, 0, 116)
    assert RunMetrics(written=[1, 2, 3, 4] * 30, find_loops=False).loop is None


def test_words() -> None:
    assert loop_words(Loop(1, 0, 60)) == "loop of 1 token since token 0"
    assert loop_words(Loop(3_000, 12_345, 3_700)) == "loop of 3,000 tokens since token 12,345"
