"""`resume`: the bytes of a run that was never stopped, wherever and however it was stopped."""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import swiftgen
from support.commands import (
    NUM_TOKENS,
    PROMPT,
    Call,
    Outcome,
    as_process,
    environment,
    wait_for_tokens,
    write_command,
)
from support.documents import (
    FailingFile,
    add_record,
    change_manifest,
    contents,
    copy_of,
    cut,
    log_of,
    manifest,
    num_prompt_tokens,
    step,
    text_of,
)
from support.fake_engine import WORDS
from support.terminals import frame, terminal
from support.tiny import ar_planner, run, sampler, tiny_target
from swiftgen.cli.app import main
from swiftgen.commands.signals import StopRequested, StopSignals
from swiftgen.decoding.sampling import Sampler
from swiftgen.display.panel import LinePrinter, LivePanel, RunInfo
from swiftgen.document.document import STEPS_NAME, TOKENS_NAME, Document, read_tokens, run_folder
from swiftgen.document.locks import lock_run
from swiftgen.document.manifest import MANIFEST_NAME, read_manifest
from swiftgen.document.recorded import check_log, read_run
from swiftgen.engine import Engine
from swiftgen.figures.metrics import RunMetrics
from swiftgen.forward.cache import BLOCK_TOKENS
from swiftgen.forward.target import Target
from swiftgen.system.errors import SwiftgenError

pytestmark = pytest.mark.usefixtures("module_cache", "engines")

LONG_PROMPT = list(range(40, 97)) + list(range(20, 75))
"""112 tokens: a text of 28 crosses a block boundary."""


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a command; keeps its streams apart."""

    def run_command(*args: str | Path) -> Outcome:
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        return Outcome(code, *capsys.readouterr())

    return run_command


@pytest.fixture
def document(written: Path, tmp_path: Path) -> Path:
    """A copy of its own."""
    return copy_of(written, tmp_path)


def assert_same(path: Path, whole: Path) -> None:
    assert path.read_bytes() == whole.read_bytes()
    assert log_of(path) == log_of(whole)
    status = read_manifest(run_folder(path))
    assert (status.status, status.stop_reason) == ("complete", "length")


# --- the loop ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_run_goes_on_with_the_same_bits(family: str) -> None:
    target = tiny_target(family)
    whole = run(target, ar_planner(target), sampler(), LONG_PROMPT, 40)
    for num_there in (1, 2, 15, 16, 17, 39):  # after 16 tokens the root is the first of a block
        rest = run(
            target, ar_planner(target), sampler(), LONG_PROMPT, 40, written=whole.token_ids[:num_there]
        )
        assert rest.token_ids == whole.token_ids[num_there:]
        assert rest.logits.equal(whole.logits[num_there:])
        assert all(map(torch.equal, rest.cached, whole.cached))


@pytest.mark.parametrize("draft", ["none", "auto", "paper"])
def test_it_goes_on_after_every_token(draft: str, preset_file: Path) -> None:
    engine = swiftgen.load(str(preset_file), {"draft": draft})
    num_tokens = 28
    whole = list(engine.stream(LONG_PROMPT, num_tokens=num_tokens))
    token_ids = [token for event in whole for token in event.token_ids]
    text = "".join(event.text for event in whole).encode()
    num_inside_characters = 0
    for num_there in range(1, num_tokens):
        rest = list(engine.stream(LONG_PROMPT, num_tokens=num_tokens, written=token_ids[:num_there]))
        assert [token for event in rest for token in event.token_ids] == token_ids[num_there:]
        begun = text_of(engine, token_ids[:num_there])
        assert begun + "".join(event.text for event in rest).encode() == text
        assert rest[-1].context_tokens == len(LONG_PROMPT) + num_tokens
        num_inside_characters += engine.tokenizer.decode(token_ids[:num_there]).encode() != begun
    assert num_inside_characters > 3


def test_what_is_written_is_read_in_passes_that_agree_and_with_progress(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids = [t for event in engine.stream(LONG_PROMPT, num_tokens=100) for t in event.token_ids]
    passes: list[tuple[int, int | None]] = []
    forward = Target.forward

    def counting(
        self: Target,
        tree: Any,
        position: int,
        cache: Any,
        num_rows: int | None = None,
        **options: Any,
    ) -> Any:
        passes.append((len(tree), num_rows))
        return forward(self, tree, position, cache, num_rows, **options)

    monkeypatch.setattr(Target, "forward", counting)
    seen: list[tuple[int, int]] = []
    events = engine.stream(
        LONG_PROMPT, num_tokens=100, written=token_ids[:90], on_prefill=lambda *done: seen.append(done)
    )
    next(iter(events))
    total = len(LONG_PROMPT) + 90 - 1
    assert seen[0] == (len(LONG_PROMPT) - 1, total)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)
    assert passes[0] == (len(LONG_PROMPT) - 1, BLOCK_TOKENS)  # the prompt as it was read the first time
    reread = passes[1 : len(seen)]
    assert sum(length for length, _ in reread) == 90
    assert {num_rows for _, num_rows in reread} == {None}
    assert len(reread) <= 90 // engine._prepared.target.max_rows + 2


def test_there_must_be_something_left_to_write(engine: Engine) -> None:
    with pytest.raises(SwiftgenError, match="cannot write 0 tokens"):
        engine.stream(PROMPT, num_tokens=2, written=[40, 41])


# --- documents ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_there", [0, 74, NUM_TOKENS - 1])
def test_a_document_goes_on(
    num_there: int, document: Path, written: Path, engine: Engine, call: Call
) -> None:
    cut(document, num_there, engine)
    result = call("resume", document)
    assert (result.code, result.out) == (0, "")
    assert_same(document, written)
    entry = read_manifest(run_folder(document)).continued[0]
    assert (entry.num_tokens, entry.differences) == (num_there, [])
    assert call("verify", "-q", document).code == 0


def test_it_goes_on_inside_a_character(
    document: Path, written: Path, engine: Engine, call: Call, tmp_path: Path
) -> None:
    token_ids = read_tokens(run_folder(written))[num_prompt_tokens(written) :]
    places = [
        n
        for n in range(1, NUM_TOKENS)
        if text_of(engine, token_ids[:n]) == text_of(engine, token_ids[: n - 1])
    ]
    assert len(places) >= 3
    for num_there in places[:3]:
        cut(document, num_there, engine)
        assert call("resume", "-q", document).code == 0
        assert_same(document, written)


def test_stops_on_stops(document: Path, written: Path, engine: Engine, call: Call) -> None:
    cut(document, 20, engine)
    for num_tokens in (21, 60, 61, 130):
        assert call("resume", "-q", document, "--tokens", str(num_tokens)).code == 0
        assert read_manifest(run_folder(document)).num_tokens == num_tokens
    assert call("resume", "-q", document, "--tokens", str(NUM_TOKENS)).code == 0
    assert_same(document, written)
    assert [entry.num_tokens for entry in read_manifest(run_folder(document)).continued] == [
        20,
        21,
        60,
        61,
        130,
    ]


def test_a_complete_run_gets_longer_even_from_inside_a_character(
    written: Path,
    engine: Engine,
    preset_file: Path,
    tmp_path: Path,
    call: Call,
) -> None:
    token_ids = read_tokens(run_folder(written))[num_prompt_tokens(written) :]
    inside = next(
        n
        for n in range(50, 150)
        if engine.tokenizer.decode(token_ids[:n]).encode() != text_of(engine, token_ids[:n])
    )
    path = tmp_path / "book.txt"
    assert call(*write_command(preset_file, path, inside), "-q").code == 0
    assert path.read_text(encoding="utf-8").endswith("\ufffd")
    assert call("resume", path, "-n", str(NUM_TOKENS)).code == 0
    assert_same(path, written)
    assert [
        file.name for file in tmp_path.iterdir() if "old" in file.name
    ] == []  # no one had changed the text


def test_a_complete_run_says_so_and_stays(document: Path, call: Call) -> None:
    before = contents(document)
    for options in ([], ["--tokens", str(NUM_TOKENS)], ["--tokens", "7"]):
        result = call("resume", document, *options)
        assert result.code == 0
        assert f"{document} is complete: 150 tokens, the planned length is reached" in result.err
        assert "--tokens" in result.err
    result = call("resume", "-q", "--json", document)
    assert (result.code, result.err) == (0, "")
    assert json.loads(result.out)["num_tokens"] == NUM_TOKENS
    assert contents(document) == before


def test_the_text_of_a_complete_run_that_is_gone_is_written_again(
    document: Path, written: Path, call: Call
) -> None:
    document.unlink()
    result = call("resume", document)
    assert (result.code, "is complete: 150 tokens" in result.err) == (0, True)
    assert_same(document, written)


def test_a_text_that_the_model_ended_is_complete_for_good(
    preset_file: Path,
    engine: Engine,
    tmp_path: Path,
    call: Call,
) -> None:
    path = tmp_path / "book.txt"
    for seed in range(20):
        options = ["--stop-at-eos", "--force", "-q", "--seed", str(seed)]
        assert call(*write_command(preset_file, path, 400), *options).code == 0
        if read_manifest(run_folder(path)).stop_reason == "eos":
            break
    else:
        pytest.fail("no text ended by itself")
    before = contents(path)
    result = call("resume", path, "--tokens", "450")
    assert (result.code, "the model ended the text" in result.err) == (0, True)
    assert contents(path) == before
    # killed after the last token, and after some tokens before
    cut(path, len(read_tokens(run_folder(path))) - num_prompt_tokens(path), engine)
    assert call("resume", "-q", path).code == 0
    after = contents(path)
    assert (after["book.txt"], after[TOKENS_NAME]) == (before["book.txt"], before[TOKENS_NAME])
    assert read_manifest(run_folder(path)).stop_reason == "eos"
    os.truncate(run_folder(path) / TOKENS_NAME, len(before[TOKENS_NAME]) - 4)  # run.yaml still says complete
    assert call("resume", "-q", path).code == 0
    assert contents(path)[TOKENS_NAME] == before[TOKENS_NAME]


def test_killed_after_the_last_token(document: Path, written: Path, engine: Engine, call: Call) -> None:
    cut(document, NUM_TOKENS, engine)
    document.write_bytes(document.read_bytes()[:-2])
    result = call("resume", document)
    assert (result.code, "is complete: 150 tokens" in result.err) == (0, True)
    assert_same(document, written)


def test_a_text_never_gets_shorter(document: Path, engine: Engine, call: Call) -> None:
    cut(document, 80, engine)
    before = contents(document)
    result = call("resume", document, "--tokens", "79")
    assert result.code == 2
    assert "has 80 tokens already, more than the 79 asked for" in result.err
    assert call("resume", document, "--tokens", "0").code == 2
    assert contents(document) == before


def test_figures_of_a_run_that_goes_on(document: Path, engine: Engine, call: Call) -> None:
    cut(document, 100, engine)
    result = call("resume", document, "--json")
    data = json.loads(result.out)
    assert (data["num_tokens"], data["num_tokens_before"], data["stop_reason"]) == (150, 100, "length")
    assert data["tokens_per_step"] == pytest.approx(50 / data["num_steps"], abs=1e-5)
    assert data["tokens_per_s"] == pytest.approx(50 / data["decode_s"], rel=0.01)
    assert "writing 150 tokens with tiny to" in result.err
    assert "100 are there" in result.err


def test_the_display_shows_that_the_text_is_read() -> None:
    info = RunInfo("tiny", "book.txt", 150, "lossless", num_written=90)
    console = Console(file=io.StringIO(), width=100)
    printer, panel = LinePrinter(console, every_s=0.0), LivePanel(terminal(100, 30))
    for reporter in (printer, panel):
        reporter.start(info)
        reporter.prefill(50, 107)
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "writing 150 tokens with tiny to book.txt, 90 are there",
        "reading what is written: 50 of 107 tokens",
    ]
    assert any(line.startswith("  reading ") and "50 / 107" in line for line in frame(panel, 100))
    panel.close()


def test_metrics_count_what_is_there_and_rate_what_is_new() -> None:
    now_s = [0.0]
    metrics = RunMetrics(lambda: now_s[0], written=[1, 2, 3, 1, 2])
    assert (metrics.snapshot().num_tokens, metrics.snapshot().tokens_per_s) == (5, None)
    metrics.start()
    now_s[0] = 10.1
    metrics.observe(step([3, 4], "x"))  # a verify pass of 0.1 s
    snapshot = metrics.snapshot()
    assert (snapshot.num_tokens, snapshot.num_tokens_before, snapshot.tokens_per_step) == (7, 5, 2.0)
    assert snapshot.tokens_per_s == snapshot.tokens_per_s_now == pytest.approx(20)
    assert snapshot.distinct[0] == pytest.approx(4 / 7)
    assert snapshot.distinct[2] == pytest.approx(4 / 5)  # 123 comes twice


# --- what a kill or a power cut leaves behind --------------------------------------------------------


@pytest.mark.parametrize("num_bytes", range(9))
def test_the_log_cut_at_every_byte_of_its_last_two_records(
    num_bytes: int, document: Path, written: Path, engine: Engine, call: Call
) -> None:
    cut(document, 140, engine, is_covered=num_bytes % 2 == 0)
    log = run_folder(document) / TOKENS_NAME
    os.truncate(log, log.stat().st_size - num_bytes)
    assert call("resume", "-q", document).code == 0
    assert_same(document, written)


@pytest.mark.parametrize(
    ("change", "is_kept"),
    [
        (lambda text: text[:-1], False),
        (lambda text: text[: len(text) // 2], False),
        (lambda text: b"", False),
        (lambda text: None, False),
        (lambda text: text + b"\n\nNotes of mine.", True),
        (lambda text: b"X" + text[1:], True),
        (lambda text: text[:40] + b"\0" * (len(text) - 40), True),
        (lambda text: text[:40] + b"\xff" + text[40:] * 3, True),
    ],
    ids=["one byte less", "half", "empty", "gone", "longer", "edited", "zeros", "garbage"],
)
def test_the_text_is_brought_in_line(
    change: Callable[[bytes], bytes | None],
    is_kept: bool,
    document: Path,
    written: Path,
    engine: Engine,
    call: Call,
) -> None:
    cut(document, 140, engine)
    changed = change(document.read_bytes())
    document.unlink()
    if changed is not None:
        document.write_bytes(changed)
    result = call("resume", document)
    assert result.code == 0
    assert_same(document, written)
    copy = document.with_name("book.txt.old")
    assert copy.exists() == is_kept == (f"kept as {copy}" in result.err)
    if is_kept:
        assert copy.read_bytes() == changed
        cut(document, 140, engine)
        document.write_bytes(b"again")
        assert call("resume", "-q", document).code == 0
        assert (copy.read_bytes(), copy.with_name("book.txt.old2").read_bytes()) == (changed, b"again")


def test_half_a_line_of_figures_is_dropped(document: Path, written: Path, engine: Engine, call: Call) -> None:
    cut(document, 140, engine)
    steps = run_folder(document) / STEPS_NAME
    with steps.open("ab") as file:
        file.write(b'{"time": "20')
    assert call("resume", "-q", document).code == 0
    assert_same(document, written)
    for line in steps.read_text(encoding="utf-8").splitlines():
        json.loads(line)


def test_no_figures_yet(document: Path, written: Path, engine: Engine, call: Call) -> None:
    cut(document, 5, engine)
    (run_folder(document) / STEPS_NAME).write_bytes(b"")
    assert call("resume", "-q", document).code == 0
    assert_same(document, written)


def test_only_the_last_checksum_within_the_log_counts(tmp_path: Path) -> None:
    """Records of longer logs remain when a log is cut and goes on otherwise (--anyway)."""
    path = tmp_path / "book.txt"
    with Document.create(path, manifest(), [5, 6, 7]) as document:
        document.append(step([1, 2, 3], "abc"))
        document.finish("error")
    folder = run_folder(path)
    os.truncate(folder / TOKENS_NAME, 4 * 4)
    path.write_text("a")
    assert not check_log(read_run(path)).is_uncut
    with Document(path, read_manifest(folder)) as document:
        document.append(step([8, 8, 8], "xyz"))
        assert read_tokens(folder) == [5, 6, 7, 1, 8, 8, 8]
        assert check_log(read_run(path)).num_sound == 4  # if it is killed now
    assert check_log(read_run(path)).num_sound == 7


# --- stopping ----------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_a_kill_and_two_writers(
    written: Path,
    preset_file: Path,
    tmp_path: Path,
    call: Call,
) -> None:
    path = tmp_path / "book.txt"
    process = as_process("support.slow_engine", *write_command(preset_file, path), cwd=tmp_path)
    wait_for_tokens(process, path, 60)
    for command in (["resume", path], [*write_command(preset_file, path), "--force"]):
        result = call(*command)
        assert result.code == 2
        assert f"{path} is being written by another swiftgen" in result.err
    process.kill()
    process.communicate(timeout=30)
    num_there = len(read_tokens(run_folder(path))) - num_prompt_tokens(path)
    assert 0 < num_there < NUM_TOKENS
    assert read_manifest(run_folder(path)).status == "running"
    assert call("resume", path, "-q").code == 0
    assert_same(path, written)
    # what the killed process had logged was not written again
    assert read_manifest(run_folder(path)).continued[0].num_tokens == num_there


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_a_signal_ends_a_resumed_run_after_its_step(
    name: str,
    code: int,
    document: Path,
    written: Path,
    engine: Engine,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut(document, 10, engine)
    pick, num_steps = Sampler.pick, itertools.count(1)

    def pick_and_signal(*args: Any) -> list[int]:
        if next(num_steps) == 5:  # in the middle of the fifth step
            os.kill(os.getpid(), getattr(signal, name))
        return pick(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "pick", pick_and_signal)
        result = call("resume", "--json", document)
    assert result.code == code
    data = json.loads(result.out)
    assert (data["num_steps"], data["stop_reason"]) == (5, "interrupted")
    num_there = data["num_tokens"]
    assert result.err.splitlines()[-2:] == [
        f"interrupted: {num_there} of 150 tokens are written to {document}",
        f"go on with `swiftgen resume {document}`",
    ]
    status = read_manifest(run_folder(document))
    assert (status.status, status.stop_reason) == ("stopped", "interrupted")
    length = len(read_tokens(run_folder(document)))
    assert num_there == length - status.num_prompt_tokens >= 15
    assert check_log(read_run(document)).num_sound == length
    assert call("resume", "-q", document).code == 0
    assert_same(document, written)


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_every_signal_has_its_exit_code(name: str, code: int, tmp_path: Path) -> None:
    path = tmp_path / "my book.txt"
    process = as_process("support.fake_engine", "write", "-n", "8000", "-o", path.name, cwd=tmp_path)
    wait_for_tokens(process, path, 20)
    process.send_signal(getattr(signal, name))
    out, err = (stream.decode() for stream in process.communicate(timeout=30))
    assert (process.returncode, out) == (code, "")
    num_there = len(read_tokens(run_folder(path))) - 2
    assert err.splitlines()[-2:] == [
        f"interrupted: {num_there:,} of 8,000 tokens are written to my book.txt",
        "go on with `swiftgen resume 'my book.txt'`",
    ]
    assert path.read_text("utf-8") == "".join(WORDS[i % 4] for i in range(num_there))


def test_a_signal_waits_for_the_step_and_the_second_does_not() -> None:
    with StopSignals() as signals:
        with signals.deferred():
            signals.check()
            os.kill(os.getpid(), signal.SIGTERM)
            reached = True
            with pytest.raises(StopRequested) as stop:
                signals.check()
            with pytest.raises(StopRequested):
                os.kill(os.getpid(), signal.SIGTERM)
        assert (reached, stop.value.exit_code) == (True, 143)
    with StopSignals(), pytest.raises(StopRequested):
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            signals.check()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_while_loading_changes_nothing(
    document: Path, engine: Engine, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(document, 140, engine)
    before = contents(document)
    monkeypatch.setattr(Engine, "prepare", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    result = call("resume", document)
    assert (result.code, result.err.splitlines()[-1]) == (143, "interrupted: nothing was written")
    assert contents(document) == before


def test_a_signal_while_reading_what_is_written(
    document: Path, written: Path, engine: Engine, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(document, 140, engine)
    with monkeypatch.context() as patch:
        forward = Target.forward

        def interrupting(*args: Any, **options: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            return forward(*args, **options)

        patch.setattr(Target, "forward", interrupting)
        result = call("resume", document)
    assert result.code == 130
    assert "interrupted: 140 of 150 tokens are written" in result.err
    assert call("resume", "-q", document).code == 0
    assert_same(document, written)


def test_a_dead_owner_leaves_no_lock(tmp_path: Path) -> None:
    code = f"""
import os, pathlib
from swiftgen.document.locks import lock_run
lock = lock_run(pathlib.Path({str(tmp_path)!r}), pathlib.Path("book.txt"))
print("locked", flush=True)
input()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"locked\n"
    with pytest.raises(SwiftgenError, match=r"book\.txt is being written by another swiftgen"):
        lock_run(tmp_path, Path("book.txt"))
    process.kill()
    process.communicate()
    lock = lock_run(tmp_path, Path("book.txt"))
    assert lock.is_locked
    lock.release()


# --- disks that fail ---------------------------------------------------------------------------------


def test_a_full_disk_stops_the_run_and_it_goes_on(
    preset_file: Path,
    written: Path,
    tmp_path: Path,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "book.txt"
    with monkeypatch.context() as patch:
        patch.setattr("swiftgen.system.storage.FileIO", FailingFile)
        patch.setattr(FailingFile, "room", 1_001)
        result = call(*write_command(preset_file, path), "-q")
    assert result.code == 1
    assert result.err.splitlines() == [
        f"error: the disk is full: {path} ends early",
        f"hint: what was written is kept; make room, then go on with `swiftgen resume {path}`",
    ]
    assert 10 < len(read_tokens(run_folder(path))) - num_prompt_tokens(path) < NUM_TOKENS
    assert call("resume", "-q", path).code == 0
    assert_same(path, written)


@pytest.mark.parametrize("what", ["folder", "text", "log"])
def test_files_that_vanish_stop_the_run(what: str, tmp_path: Path) -> None:
    now_s = [0.0]
    path, away = tmp_path / "book.txt", tmp_path / "away"
    moved = {"folder": run_folder(path), "text": path, "log": run_folder(path) / TOKENS_NAME}[what]

    def move_in_the_middle() -> None:
        with Document.create(path, manifest(), [5, 6, 7], clock=lambda: now_s[0]) as document:
            document.append(step([1], "a"))
            moved.rename(away)
            now_s[0] += 2
            document.append(step([2], "b"))

    with pytest.raises(SwiftgenError, match="was moved, removed or replaced while it was written") as error:
        move_in_the_middle()
    assert (error.value.exit_code, "`swiftgen resume" in error.value.hint) == (1, True)
    away.rename(moved)
    assert (read_tokens(run_folder(path)), path.read_text()) == ([5, 6, 7, 1, 2], "ab")


# --- what is refused ---------------------------------------------------------------------------------

CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "model": (lambda data: data["model"].update(fingerprint="0" * 64), "the model has fingerprint"),
    "attention": (lambda data: data["arithmetic"].update(attention="sums of 1992"), "was sums of 1992"),
    "torch": (lambda data: data["arithmetic"].update(torch="1.0"), "was 1.0"),
    "sizes": (lambda data: data["arithmetic"].update(pass_sizes=[3]), "was [3]"),
    "new in it": (lambda data: data["arithmetic"].pop("dtype"), "dtype is float32, was None"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_another_model_or_arithmetic_is_refused(
    case: str, document: Path, engine: Engine, call: Call
) -> None:
    cut(document, 140, engine)
    change, reason = CHANGES[case]
    change_manifest(document, change)
    before = contents(document)
    result = call("resume", "-q", document)
    assert result.code == 2
    error, hint = result.err.splitlines()
    assert reason in error
    assert "--anyway" in hint
    assert contents(document) == before


@pytest.mark.parametrize("case", ["model", "attention"])
def test_anyway_goes_on_and_records_it(
    case: str, document: Path, written: Path, engine: Engine, call: Call
) -> None:
    cut(document, 140, engine)
    change, reason = CHANGES[case]
    change_manifest(document, change)
    result = call("resume", "-q", "--anyway", document)
    assert result.code == 0
    assert document.read_bytes() == written.read_bytes()  # it was only said to be different
    status = read_manifest(run_folder(document))
    (entry,) = status.continued
    assert (entry.num_tokens, len(entry.differences)) == (140, 1)
    assert reason in entry.differences[0]
    assert status.arithmetic == read_manifest(run_folder(written)).arithmetic  # that of the last tokens
    verdict = call("verify", "-q", document)
    assert verdict.code == 0
    assert "continued with --anyway after token 140: " in verdict.out
    assert call("resume", "-q", document, "-n", "160").code == 0  # what it was continued with is known now


def test_the_stretch_of_the_positions_stays(
    preset_file: Path,
    engine: Engine,
    tmp_path: Path,
    call: Call,
) -> None:
    path = tmp_path / "long.txt"
    long_context = ["--set", "long_context=yarn", "--draft", "auto", "-q"]
    assert call(*write_command(preset_file, path, 500), *long_context).code == 0
    folder, whole = run_folder(path), read_tokens(run_folder(path))
    text = path.read_bytes()
    assert read_manifest(folder).model.max_positions == 1024

    cut(path, 100, engine)
    result = call("resume", "-q", path, "-n", "1100")
    assert result.code == 2
    assert "the run was begun with 1,024" in result.err
    assert (
        call("resume", "-q", path, "-n", "130").code == 0
    )  # fits into 512 positions, but was begun with more
    assert read_tokens(folder) == whole[: num_prompt_tokens(path) + 130]
    assert call("verify", "-q", path).code == 0
    assert call("resume", "-q", path, "-n", "500").code == 0
    assert (read_tokens(folder), path.read_bytes()) == (whole, text)


def test_longer_than_the_model_reaches_is_refused(document: Path, call: Call) -> None:
    before = contents(document)
    result = call("resume", "-q", document, "-n", "9000")
    assert result.code == 2
    assert "9,000 tokens need " in result.err
    assert "the run was begun with 512" in result.err
    assert contents(document) == before


# --- damage ------------------------------------------------------------------------------------------


def flip(file: Path, place: int, bit: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1 << bit
    file.write_bytes(data)


DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "yaml missing": (MANIFEST_NAME, Path.unlink, "cannot read"),
    "yaml empty": (MANIFEST_NAME, lambda file: os.truncate(file, 0), "is damaged"),
    "yaml cut": (MANIFEST_NAME, lambda file: os.truncate(file, 700), "its checksum is another"),
    "yaml flipped": (MANIFEST_NAME, lambda file: flip(file, 400), "its checksum is another"),
    "log missing": (TOKENS_NAME, Path.unlink, "cannot read"),
    "log empty": (TOKENS_NAME, lambda file: os.truncate(file, 0), "it ends inside the prompt"),
    "log cut in the prompt": (TOKENS_NAME, lambda file: os.truncate(file, 15), "it ends inside the prompt"),
    "log flipped in the prompt": (TOKENS_NAME, lambda file: flip(file, 8), "damaged from its beginning"),
    "log flipped": (TOKENS_NAME, lambda file: flip(file, 300), "is damaged after its first"),
    "log flipped at its end": (TOKENS_NAME, lambda file: flip(file, -1, 7), "is damaged after its first"),
    "figures missing": (STEPS_NAME, Path.unlink, "cannot read"),
    "figures garbled": (STEPS_NAME, lambda file: flip(file, 0, 7), "is damaged in line 1"),
    "checksum flipped": (
        STEPS_NAME,
        lambda file: file.write_bytes(file.read_bytes().replace(b'"log_crc32": ', b'"log_crc32": 1')),
        "is damaged",
    ),
}


def refused(path: Path, message: str, call: Call) -> None:
    """Two lines, and nothing is changed."""
    before = contents(path)
    result = call("resume", "-q", path)
    assert (result.code, result.out) == (2, "")
    lines = result.err.splitlines()
    assert [line.split(":")[0] for line in lines] in (["error"], ["error", "hint"])
    assert message in lines[0]
    assert contents(path) == before


@pytest.mark.parametrize("case", DAMAGE)
@pytest.mark.parametrize("is_complete", [True, False])
def test_damage_is_one_line_and_nothing_is_lost(
    case: str, is_complete: bool, document: Path, engine: Engine, call: Call
) -> None:
    if not is_complete:
        cut(document, NUM_TOKENS, engine)
    name, damage, message = DAMAGE[case]
    damage(run_folder(document) / name)
    refused(document, message, call)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (MANIFEST_NAME, "is the run folder of other.txt"),
        (TOKENS_NAME, "no checksum covers the log after its first"),  # shorter, with the same prompt
        (STEPS_NAME, "tokens.bin is damaged after its first"),
    ],
)
def test_swapped_files_are_found(name: str, message: str, document: Path, other: Path, call: Call) -> None:
    shutil.copy(run_folder(other) / name, run_folder(document) / name)
    refused(document, message, call)


def test_a_flipped_bit_of_settings_or_log_is_found_wherever_it_is(document: Path) -> None:
    folder = run_folder(document)
    num_header_bytes = len(b"".join((folder / MANIFEST_NAME).read_bytes().splitlines(keepends=True)[:2]))
    for name, first in ((MANIFEST_NAME, num_header_bytes), (TOKENS_NAME, 0)):
        data = (folder / name).read_bytes()
        for place, bit in zip(range(first, len(data), 3), itertools.cycle(range(8)), strict=False):
            flip(folder / name, place, bit)
            with pytest.raises(SwiftgenError, match="damaged"):
                check_log(read_run(document))
            (folder / name).write_bytes(data)
    assert check_log(read_run(document)).is_uncut


def test_a_log_damaged_at_its_end_can_be_cut_to_its_sound_part(
    document: Path, written: Path, engine: Engine, call: Call
) -> None:
    """As the hint says."""
    folder = run_folder(document)
    cut(document, NUM_TOKENS, engine)
    sound = num_prompt_tokens(document) + 70
    (folder / STEPS_NAME).write_bytes(b"")
    add_record(document, sound)
    add_record(document, sound + 80)
    flip(folder / TOKENS_NAME, 4 * (sound + 5))
    result = call("resume", "-q", document)
    assert result.code == 2
    assert f"is damaged after its first {sound} tokens" in result.err
    assert f"`truncate -s {4 * sound} {folder / TOKENS_NAME}`" in result.err
    os.truncate(folder / TOKENS_NAME, 4 * sound)
    assert call("resume", "-q", document).code == 0
    assert_same(document, written)


@pytest.mark.parametrize("damaged", ["log", "text"])
def test_a_last_second_that_text_and_log_tell_differently(
    damaged: str, document: Path, written: Path, engine: Engine, call: Call
) -> None:
    """No checksum covers it, so neither is trusted; as the hint says, it is written again."""
    folder = run_folder(document)
    cut(document, 140, engine, is_covered=False)
    sound = num_prompt_tokens(document) + 70
    add_record(document, sound)
    if damaged == "log":
        token_ids = read_tokens(folder)
        shown = next(
            i for i in range(sound, len(token_ids)) if chr(32) < engine.tokenizer.decode(token_ids[i]) < "~"
        )
        flip(folder / TOKENS_NAME, 4 * shown)
    else:
        flip(document, len(document.read_bytes()) - 5, 3)
    before = contents(document)
    result = call("resume", "-q", document)
    assert result.code == 2
    assert f"no checksum covers the log after its first {sound} tokens" in result.err
    assert f"`truncate -s {4 * sound} {folder / TOKENS_NAME}`" in result.err
    assert contents(document) == before
    os.truncate(folder / TOKENS_NAME, 4 * sound)
    assert call("resume", "-q", document).code == 0
    assert_same(document, written)


def test_a_token_the_model_does_not_have(document: Path, engine: Engine, call: Call) -> None:
    cut(document, 140, engine)
    folder = run_folder(document)
    (folder / STEPS_NAME).write_bytes(b"")
    with (folder / TOKENS_NAME).open("ab") as log:
        log.write(struct.pack("<I", 70_000))
    refused_line = "the token log of"
    before = contents(document)
    result = call("resume", "-q", document)
    assert (result.code, refused_line in result.err, "holds token 70000" in result.err) == (2, True, True)
    assert contents(document) == before


def test_what_is_no_run_is_an_error(tmp_path: Path, call: Call) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for name in ("notes.txt", "missing.txt"):
        result = call("resume", tmp_path / name)
        assert (result.code, "has no run folder" in result.err) == (2, True)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_an_existing_document_is_offered_to_resume(document: Path, preset_file: Path, call: Call) -> None:
    result = call(*write_command(preset_file, document))
    assert result.code == 2
    assert f"go on with it by `swiftgen resume {document}`" in result.err
