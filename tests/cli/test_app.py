"""The command line with a fake engine: streams, exit codes, one-line errors, nothing written by mistake."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import swiftgen
from support.commands import Outcome, as_process, environment, wait_for_tokens
from support.fake_engine import WORDS, FakeEngine, FakeLoad, FakeStep
from swiftgen.cli.app import main
from swiftgen.commands.prompts import DEFAULT_PROMPT
from swiftgen.document.document import read_tokens
from swiftgen.document.manifest import read_manifest
from swiftgen.settings.presets import DEFAULT_PRESET
from swiftgen.settings.schema import Preset
from swiftgen.system.errors import SwiftgenError


class Runner:
    """Runs commands in a folder of their own and keeps stdout and stderr apart."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(folder)
        monkeypatch.setenv("COLUMNS", "100")
        self.folder, self._monkeypatch, self._capsys = folder, monkeypatch, capsys
        self.load = FakeLoad()

    def fake(self, **engine_options: Any) -> None:
        self.load = FakeLoad(**engine_options)

    def __call__(self, *args: str, stdin: bytes = b"") -> Outcome:
        # Through the module's dictionary: its __getattr__ would import PyTorch for the real one.
        self._monkeypatch.setitem(vars(swiftgen), "load", self.load)
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main(list(args))
        return Outcome(code, *self._capsys.readouterr())

    def files(self) -> list[str]:
        return sorted(str(p.relative_to(self.folder)) for p in self.folder.rglob("*"))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(tmp_path, monkeypatch, capsys)


def test_the_fake_step_has_the_fields_of_the_real_one() -> None:
    from swiftgen.decoding.decode import StepEvent

    assert {f.name for f in dataclasses.fields(FakeStep)} == {f.name for f in dataclasses.fields(StepEvent)}


@pytest.mark.parametrize("name", ["encode", "prepare", "stream"])
def test_the_fake_engine_is_called_as_the_real_one_is(name: str) -> None:
    from swiftgen.engine import Engine

    fake, real = (inspect.signature(getattr(engine, name)) for engine in (FakeEngine, Engine))
    assert list(fake.parameters) == list(real.parameters)


# --- the normal ways ---------------------------------------------------------------------------------


def test_text_goes_to_stdout_and_all_else_to_stderr(run: Runner) -> None:
    result = run("write", "--tokens", "6")
    assert result.code == 0
    assert result.out == "Zoë saw 日本\nZoë saw"  # a pipe gets the text alone
    assert "loading smollm2-135m" in result.err
    assert "planned length reached" in result.err
    assert "lossless" in result.err
    assert run.files() == []


def test_a_document_with_its_run_folder(run: Runner) -> None:
    result = run("write", "-n", "4", "-o", "book.txt", "--seed", "9", "--prompt", "Go.")
    assert (result.code, result.out) == (0, "")
    assert (run.folder / "book.txt").read_bytes() == "Zoë saw 日本\n".encode()
    assert read_tokens(run.folder / "book.swiftgen") == [100, 101, 0, 1, 2, 3]
    manifest = read_manifest(run.folder / "book.swiftgen")
    assert (manifest.status, manifest.seed, manifest.num_tokens, manifest.num_prompt_tokens) == (
        "complete",
        9,
        4,
        2,
    )
    assert manifest.model.dtype == "float32"
    assert manifest.arithmetic == {"dtype": "float32", "pass_sizes": [1, 2]}
    assert manifest.versions["swiftgen"] == swiftgen.__version__
    assert run.load.engine is not None
    assert Preset.model_validate(manifest.preset) == run.load.engine.preset
    assert (run.load.engine.prompt, run.load.engine.seed) == ("Go.", 9)


def test_json_is_one_line_where_the_text_is_not(run: Runner) -> None:
    result = run("write", "-n", "4", "-o", "book.txt", "--json", "--quiet")
    data = json.loads(result.out)
    assert (data["output"], data["num_tokens"], data["stop_reason"]) == ("book.txt", 4, "length")
    assert (data["preset"], data["seed"], data["num_prompt_tokens"]) == (DEFAULT_PRESET, 0, 2)
    assert (data["num_steps"], data["acceptance_rate"]) == (4, 0.0)
    assert result.err == ""

    result = run("write", "-n", "1", "--json", "--quiet")
    assert result.out == "Zoë"
    assert json.loads(result.err)["output"] is None


def test_quiet_shows_nothing(run: Runner) -> None:
    assert run("write", "-n", "2", "-q", "-o", "-") == Outcome(0, "Zoë saw", "")


def test_flags_become_settings_and_win_over_the_preset(run: Runner) -> None:
    options = ["--temperature", "0", "--draft", "none", "--raw", "--system", "Be brief: yes", "--stop-at-eos"]
    run("write", "-n", "1", *options, "--set", "sampler.min_p=0.3", "--set", "kv_budget=512")
    assert run.load.engine is not None
    preset = run.load.engine.preset
    assert (preset.sampler.temperature, preset.sampler.min_p, preset.kv_budget) == (0, 0.3, 512)
    assert (preset.draft, preset.chat, preset.system, preset.eos) == ("none", False, "Be brief: yes", "stop")


@pytest.mark.parametrize(
    ("args", "stdin", "expected"),
    [
        ([], b"", DEFAULT_PROMPT),
        (["--prompt", " a\n"], b"", " a\n"),
        (["-"], "Zoë\r\nb\n\n".encode(), "Zoë\r\nb\n"),
        (["--prompt-file", "-"], b"x\r\n", "x"),
        (["--prompt-file", "prompt.txt"], b"", "\x00日本"),
    ],
)
def test_where_the_prompt_comes_from(run: Runner, args: list[str], stdin: bytes, expected: str) -> None:
    (run.folder / "prompt.txt").write_bytes(b"\xef\xbb\xbf" + "\x00日本\n".encode())
    assert run("write", "-n", "1", *args, stdin=stdin).code == 0
    assert run.load.engine is not None
    assert run.load.engine.prompt == expected


def test_force_replaces(run: Runner) -> None:
    run("write", "-n", "4", "-o", "book.txt")
    assert run("write", "-n", "1", "-o", "book.txt").code == 2
    assert run("write", "-n", "1", "-o", "book.txt", "--force").code == 0
    assert (run.folder / "book.txt").read_text("utf-8") == "Zoë"


def test_presets_are_listed_and_printed(run: Runner) -> None:
    listed = run("presets")
    assert listed.out.startswith(DEFAULT_PRESET)
    assert "llama31-8b" in listed.out
    printed = run("presets", DEFAULT_PRESET)
    (run.folder / "mine.yaml").write_text(printed.out)
    assert run("presets", "./mine.yaml").out == printed.out
    assert run("presets", "nope").code == 2


def test_help_version_and_nothing_at_all(run: Runner) -> None:
    assert run("--version").out == f"swiftgen {swiftgen.__version__}\n"
    assert "presets" in run().out
    assert run().code == run("--help").code == 0
    shown = run("write", "--help")
    assert "swiftgen write --tokens 2000 -o book.txt" in shown.out
    assert DEFAULT_PRESET in shown.out
    assert shown.err == ""


# --- bad input ---------------------------------------------------------------------------------------

BAD_INPUT = {
    "tokens zero": (["--tokens", "0"], "--tokens is 0"),
    "tokens negative": (["--tokens", "-5"], "--tokens is -5"),
    "tokens no number": (["--tokens", "many"], "--tokens"),
    "seed": (["--seed", "-1"], "--seed is -1"),
    "seed too large": (["--seed", str(2**63)], "--seed"),
    "empty prompt": (["--prompt", ""], "the prompt is empty (--prompt)"),
    "blank prompt": (["--prompt", " \n"], "the prompt is empty (--prompt)"),
    "empty stdin": (["-"], "the prompt is empty (stdin)"),
    "broken prompt": (["--prompt", "a\udcff"], "not valid Unicode (character 1)"),
    "empty file": (["--prompt-file", "empty.txt"], "the prompt is empty (empty.txt)"),
    "invalid file": (["--prompt-file", "latin1.txt"], "latin1.txt is not valid UTF-8: byte 0xeb at offset 2"),
    "missing file": (["--prompt-file", "no.txt"], "cannot read the prompt file no.txt: No such file"),
    "folder as file": (["--prompt-file", "."], "cannot read the prompt file ."),
    "two prompts": (["--prompt", "a", "--prompt-file", "b"], "given twice: --prompt and --prompt-file"),
    "prompt and stdin": (["--prompt", "a", "-"], "given twice: --prompt and - (stdin)"),
    "bare text": (["Once upon a time"], "unexpected argument 'Once upon a time'"),
    "unknown preset": (["--preset", "smollm"], "no preset named 'smollm'"),
    "unknown setting": (["--set", "min_p=1"], "unknown setting 'min_p'"),
    "no value": (["--set", "k"], "is not key=value"),
    "value out of range": (["--temperature", "-1"], "sampler.temperature is -1.0"),
    "unknown draft": (["--draft", "fast"], "draft is 'fast'"),
    "set twice": (["--draft", "none", "--set", "draft=auto"], "draft is set twice"),
    "unknown option": (["--foo"], "--foo"),
    "missing folder": (["-o", "no/book.txt"], "the folder no does not exist"),
    "folder as output": (["-o", "."], "is a folder"),
    "existing output": (["-o", "latin1.txt"], "latin1.txt exists already"),
    "run folder name": (["-o", "x.swiftgen"], "kept for run folders"),
    "long name": (["-o", "x" * 300], "File name too long"),
    "line break in a name": (["-o", "no\n\x1b[2J/book.txt"], r"the folder no \x1b[2J does not exist"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_two_lines_and_writes_nothing(run: Runner, case: str) -> None:
    args, message = BAD_INPUT[case]
    (run.folder / "empty.txt").write_bytes(b"\n")
    (run.folder / "latin1.txt").write_bytes("Zoë".encode("latin-1"))
    before = run.files()
    result = run("write", *args)
    assert result.code == 2
    assert result.out == ""
    lines = result.err.splitlines()
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("hint: "))
    assert run.files() == before
    assert run.load.engine is None  # found out before the model was loaded


def test_an_unknown_command_and_an_unwritable_folder(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("wirte")
    assert result.code == 2
    assert "'write'" in result.err.splitlines()[0]
    monkeypatch.setattr(os, "access", lambda *_: False)
    result = run("write", "-o", "book.txt")
    assert result.code == 2
    assert "not writable" in result.err


def test_an_error_of_the_engine_is_two_lines_and_keeps_the_old_document(run: Runner) -> None:
    run("write", "-n", "1", "-o", "book.txt")
    result = run("write", "-n", "9000", "-o", "book.txt", "--force", "-q")
    assert result == Outcome(
        2, "", "error: 9002 positions are needed, the model has 9000\nhint: ask for fewer\n"
    )
    assert (run.folder / "book.txt").read_text("utf-8") == "Zoë"


# --- ends before the end -----------------------------------------------------------------------------


def test_an_interrupt_keeps_everything_and_says_how_much(run: Runner) -> None:
    run.fake(failure=KeyboardInterrupt())
    result = run("write", "-n", "1000", "-o", "book.txt", "--json")
    assert result.code == 130
    assert "interrupted: 3 of 1,000 tokens are written to book.txt" in result.err
    assert json.loads(result.out)["stop_reason"] == "interrupted"
    assert (run.folder / "book.txt").read_text("utf-8") == "Zoë saw 日本"
    assert read_tokens(run.folder / "book.swiftgen") == [100, 101, 0, 1, 2]
    manifest = read_manifest(run.folder / "book.swiftgen")
    assert (manifest.status, manifest.stop_reason) == ("stopped", "interrupted")


def test_a_failure_in_the_middle_keeps_everything(run: Runner) -> None:
    run.fake(failure=SwiftgenError("out of memory", "close something", exit_code=1))
    result = run("write", "-n", "1000", "-o", "book.txt", "-q")
    assert result == Outcome(1, "", "error: out of memory\nhint: close something\n")
    assert (run.folder / "book.txt").read_text("utf-8") == "Zoë saw 日本"
    assert read_manifest(run.folder / "book.swiftgen").stop_reason == "error"


def test_an_interrupt_while_loading_writes_nothing(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: FakeEngine, prompt_tokens: int, num_tokens: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeEngine, "prepare", interrupted)
    result = run("write", "-o", "book.txt")
    assert result.code == 130
    assert result.err.splitlines()[-1] == "interrupted: nothing was written"
    assert run.files() == []


def test_a_closed_pipe_ends_the_run_in_silence(tmp_path: Path) -> None:
    process = as_process("support.fake_engine", "write", "-n", "8000", "-q", cwd=tmp_path)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(4) == "Zoë".encode()
    process.stdout.close()
    assert process.wait(timeout=30) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_in_a_real_process(tmp_path: Path) -> None:
    process = as_process("support.fake_engine", "write", "-n", "8000", "-o", "book.txt", cwd=tmp_path)
    wait_for_tokens(process, tmp_path / "book.txt", 20)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err
    num_tokens = len(read_tokens(tmp_path / "book.swiftgen")) - 2
    expected = "".join(WORDS[i % 4] for i in range(num_tokens))
    assert (tmp_path / "book.txt").read_text("utf-8") == expected
    assert f"{num_tokens:,} of 8,000 tokens are written to book.txt".encode() in err


def test_a_piped_stdin_is_the_prompt(tmp_path: Path) -> None:
    process = as_process("support.fake_engine", "write", "-n", "1", "-q", cwd=tmp_path, stdin=subprocess.PIPE)
    out, err = process.communicate(b"\xff", timeout=30)
    assert (process.returncode, out) == (2, b"")
    assert err.startswith(b"error: stdin is not valid UTF-8: byte 0xff at offset 0")


# --- quick to start ----------------------------------------------------------------------------------


def test_help_is_quick() -> None:
    """Told by what it imports: times differ from machine to machine."""
    command = [sys.executable, "-X", "importtime", "-m", "swiftgen", "--help"]
    done = subprocess.run(command, capture_output=True, check=True, text=True, env=environment())
    assert "write" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "swiftgen.cli.app" in imported
    assert not {"torch", "transformers", "numpy", "huggingface_hub", "tokenizers", "safetensors"} & imported
    assert len(imported) < 500  # of 325 where this was written


@pytest.mark.parametrize(
    "module",
    ["swiftgen.cli.app", "swiftgen.commands.write", "swiftgen.display.panel", "swiftgen.document.document"],
)
def test_pytorch_is_not_imported_before_it_is_needed(module: str) -> None:
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'transformers', 'numpy'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], env=environment()).returncode == 0
