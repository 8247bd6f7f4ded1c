"""Several processes that write one text: tensor parallel on the CPU, with gloo."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, Olmo2Config

from support.model_files import save_model, tiny_config, write_gguf
from swiftgen.cli.app import main
from swiftgen.document.document import read_tokens
from swiftgen.heads.files import HeadsInfo, save_heads
from swiftgen.heads.modules import new_heads
from swiftgen.models.tensor_parallel import num_kv_heads, whole
from swiftgen.system import ranks
from swiftgen.system.errors import SwiftgenError

_FORK = multiprocessing.get_context("fork")  # what is imported here need not be imported by every rank
TIMEOUT_S = 50
HIDDEN_SIZE = 96
ASKED = "--preset", "t.yaml", "--raw", "--prompt", "the hen held the shell"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that three ranks can share; what is found out about it is kept beside it."""
    path = tmp_path_factory.mktemp("parallel") / "tiny"
    sizes = {"hidden_size": HIDDEN_SIZE, "num_attention_heads": 6, "num_key_value_heads": 6}
    save_model(path, max_position_embeddings=1024, initializer_range=0.3, **sizes)
    return path


@pytest.fixture
def folder(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where to write, with a preset t.yaml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWIFTGEN_CACHE", str(model.parent / "cache"))
    settings = f"model: {{source: {model}, device: cpu, dtype: float32}}\n"
    (tmp_path / "t.yaml").write_text(settings, encoding="utf-8")
    return tmp_path


@dataclass
class Ranks:
    """Processes that run one command together."""

    processes: list[multiprocessing.Process]
    folder: Path

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.processes[rank].pid or 0, number)

    def ends(self) -> list[int]:
        """Exit codes of all; what does not end is killed."""
        deadline_s = time.monotonic() + TIMEOUT_S
        for process in self.processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.join()
        return [process.exitcode or 0 for process in self.processes]

    def said(self, rank: int) -> str:
        """What a rank has printed."""
        return (self.folder / f"said.{rank}").read_text(encoding="utf-8")


def start(folder: Path, num_ranks: int, *args: str) -> Ranks:
    """Starts a command as torchrun does."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {
        "TORCHELASTIC_RUN_ID": "test",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }
    processes = []
    for rank in range(num_ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = _FORK.Process(target=_be, args=(folder / f"said.{rank}", environment | own, args))
        process.start()
        processes.append(process)
    return Ranks(processes, folder)


def _be(said: Path, environment: dict[str, str], args: Sequence[str]) -> None:
    os.environ.update(environment)
    file = os.open(said, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(file, number)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    for stream in ("stdout", "stderr"):
        text = open(1 if stream == "stdout" else 2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        setattr(sys, stream, text)
        setattr(sys, f"__{stream}__", text)
    code = main(args)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wrote(folder: Path, num_ranks: int, name: str, *args: str, num_tokens: int = 40) -> list[int]:
    """The token log of a document that so many ranks write."""
    run = start(folder, num_ranks, "write", *ASKED, "-n", str(num_tokens), "-o", name, *args)
    assert run.ends() == [0] * num_ranks, [run.said(rank) for rank in range(num_ranks)]
    assert all(not run.said(rank) for rank in range(1, num_ranks))
    return read_tokens((folder / name).with_suffix(".swiftgen"))


class TestTheSameText:
    def test_with_drafts_as_without(self, folder: Path):
        plain = wrote(folder, 2, "plain.txt", "--draft", "none")
        for how in ("auto", "paper"):
            assert wrote(folder, 2, f"{how}.txt", "--draft", how) == plain
            assert (folder / f"{how}.txt").read_bytes() == (folder / "plain.txt").read_bytes()
        assert _accepted(folder / "paper.swiftgen") > 0

    def test_with_heads(self, folder: Path):
        (folder / "heads").mkdir()
        heads = new_heads("recurrent", HIDDEN_SIZE, 3, 1e-6, vocabulary=torch.arange(0, 258, 2), width=32)
        save_heads(heads, folder / "heads", HeadsInfo())
        plain = wrote(folder, 2, "plain.txt", "--draft", "none")
        drafted = "--draft", "heads", "--set", f"heads={folder / 'heads'}"
        assert wrote(folder, 2, "heads.txt", *drafted) == plain

    def test_on_three_ranks_in_bfloat16(self, folder: Path):
        """Where a sum in the order of a library would depend on the place of a row."""
        plain = wrote(folder, 3, "plain.txt", "--draft", "none", "--set", "model.dtype=bfloat16")
        drafted = "--draft", "paper", "--set", "model.dtype=bfloat16"
        assert wrote(folder, 3, "drafted.txt", *drafted) == plain
        assert _accepted(folder / "drafted.swiftgen") > 0

    def test_a_gguf_file_writes_what_its_weights_do(self, folder: Path, model: Path):
        write_gguf(folder / "tiny.gguf", LlamaForCausalLM.from_pretrained(model))
        source = "--set", f"model.source={folder / 'tiny.gguf'}", "--draft", "paper"
        assert wrote(folder, 2, "packed.txt", *source) == wrote(folder, 2, "plain.txt", "--draft", "none")


def _accepted(run_folder: Path) -> int:
    """Draft tokens that were right."""
    last = (run_folder / "steps.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    return int(json.loads(last)["num_accepted"])


class TestOneWriter:
    def test_what_is_on_disk(self, folder: Path):
        wrote(folder, 2, "book.txt")
        kinds = {".swiftgen", ".txt"}
        assert sorted(path.name for path in folder.iterdir() if path.suffix in kinds) == [
            "book.swiftgen",
            "book.txt",
        ]
        assert "ranks: 2" in (folder / "book.swiftgen/run.yaml").read_text(encoding="utf-8")

    def test_stdout(self, folder: Path):
        run = start(folder, 2, "write", *ASKED, "-n", "20", "-q")
        assert run.ends() == [0, 0]
        assert run.said(0)
        assert not run.said(1)

    def test_mistakes_are_reported_once(self, folder: Path):
        run = start(folder, 2, "write", "--preset", "nowhere")
        assert run.ends() == [2, 0]
        assert run.said(0).count("error:") == 1
        assert not run.said(1)

    def test_what_one_rank_cannot_do_none_does(self, folder: Path):
        run = start(folder, 2, "write", "--preset", "t.yaml", "-n", "5000")
        assert run.ends() == [2, 1]
        assert "positions" in run.said(0)
        assert not run.said(1)

    def test_other_commands_run_alone(self, folder: Path):
        run = start(folder, 2, "doctor")
        assert run.ends() == [2, 0]
        assert "doctor runs in one process" in run.said(0)


class TestAnEnd:
    def test_of_a_rank_ends_the_other_and_resume_goes_on(self, folder: Path):
        whole_text = wrote(folder, 2, "whole.txt", num_tokens=300)
        run = start(folder, 2, "write", *ASKED, "-n", "300", "-o", "book.txt", "-q")
        _wait_for(folder / "book.txt", 20)
        run.kill(1)
        assert run.ends() == [1, -signal.SIGKILL]
        ended, go_on = run.said(0).splitlines()
        assert ended.startswith("another process of this run has ended: ")
        assert go_on == "go on with `torchrun --nproc-per-node 2 -m swiftgen resume book.txt`"
        assert len(read_tokens(folder / "book.swiftgen")) < len(whole_text)
        resumed = start(folder, 2, "resume", "book.txt", "-q")
        assert resumed.ends() == [0, 0], resumed.said(0)
        assert read_tokens(folder / "book.swiftgen") == whole_text
        assert (folder / "book.txt").read_bytes() == (folder / "whole.txt").read_bytes()

    def test_of_the_first_rank(self, folder: Path):
        run = start(folder, 2, "write", *ASKED, "-n", "900", "-o", "book.txt", "-q")
        _wait_for(folder / "book.txt", 20)
        run.kill(0)
        assert run.ends() == [-signal.SIGKILL, 1]
        assert not run.said(1)

    def test_by_a_signal_to_all(self, folder: Path):
        run = start(folder, 2, "write", *ASKED, "-n", "900", "-o", "book.txt", "-q")
        _wait_for(folder / "book.txt", 20)
        for _ in range(2):  # as torchrun repeats what reaches the group from a terminal
            for rank in (1, 0):
                run.kill(rank, signal.SIGINT)
        assert run.ends() == [130, 130]
        assert run.said(0).startswith("interrupted: ")
        assert "status: stopped" in (folder / "book.swiftgen/run.yaml").read_text(encoding="utf-8")

    def test_of_a_rank_that_does_not_answer(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(ranks, "_GRACE_S", 0.5)
        run = start(folder, 2, "write", *ASKED, "-n", "900", "-o", "book.txt", "-q")
        _wait_for(folder / "book.txt", 20)
        run.kill(1, signal.SIGSTOP)
        time.sleep(0.2)
        run.kill(0, signal.SIGTERM)
        run.processes[0].join(TIMEOUT_S)
        assert run.processes[0].exitcode == 1
        assert "does not answer" in run.said(0)
        run.kill(1)
        run.ends()


class TestOtherRanks:
    def test_another_number_of_them_is_refused(self, folder: Path, capfd: pytest.CaptureFixture[str]):
        wrote(folder, 2, "book.txt", num_tokens=30)
        assert main(["resume", "book.txt", "-n", "40"]) == 2
        assert "ranks is 1, was 2" in capfd.readouterr().err
        assert main(["verify", "book.txt"]) == 2
        assert "written by 2 processes together, and 1 round otherwise" in capfd.readouterr().err

    def test_verify_proves_it_with_as_many(self, folder: Path):
        wrote(folder, 2, "book.txt", num_tokens=30)
        run = start(folder, 2, "verify", "book.txt", "-q")
        assert run.ends() == [0, 0]
        assert "30 of 30 tokens are exactly what plain decoding writes" in run.said(0)
        assert not run.said(1)


class TestHeads:
    def test_that_do_not_divide(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(ranks, "num_ranks", lambda: 3)
        with pytest.raises(SwiftgenError, match="the 2 KV heads of this model cannot be spread") as caught:
            num_kv_heads(tiny_config())
        assert caught.value.hint == "possible with --nproc-per-node: 1, 2"

    def test_of_a_rank(self, monkeypatch: pytest.MonkeyPatch):
        assert num_kv_heads(tiny_config()) == 2
        monkeypatch.setattr(ranks, "num_ranks", lambda: 2)
        assert num_kv_heads(tiny_config()) == 1
        olmo = Olmo2Config(num_key_value_heads=2, num_attention_heads=4)
        assert num_kv_heads(olmo) == 2  # its plan gathers queries and keys: every rank has all

    def test_a_model_without_a_plan(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(ranks, "num_ranks", lambda: 2)
        config = tiny_config()
        config.base_model_tp_plan = None
        with pytest.raises(SwiftgenError, match="no tensor-parallel plan for llama"):
            num_kv_heads(config)

    def test_a_plain_tensor_is_whole(self):
        tensor = torch.ones(2)
        assert whole(tensor) is tensor


@pytest.mark.slow
def test_torchrun(folder: Path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "swiftgen"]
    done = subprocess.run(
        [*command, "write", *ASKED, "-n", "20"], capture_output=True, timeout=120, check=True
    )
    assert wrote(folder, 2, "book.txt", num_tokens=20)
    assert done.stdout == (folder / "book.txt").read_bytes()


def _wait_for(text: Path, num_bytes: int) -> None:
    """Until a text has been written so far."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not (text.exists() and text.stat().st_size >= num_bytes):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
