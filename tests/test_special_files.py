"""Pipes, sockets, devices, folders and links where a file is expected: one clear line, and nobody waits."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.commands import Outcome
from support.documents import PROMPT, manifest
from support.fake_engine import FakeLoad
from support.model_files import save_model
from swiftgen.cli.app import main
from swiftgen.document.document import STEPS_NAME, TOKENS_NAME, Document, run_folder
from swiftgen.document.locks import LOCK_NAME
from swiftgen.document.manifest import MANIFEST_NAME
from swiftgen.heads.files import WEIGHTS_FILE
from swiftgen.settings.presets import load_preset
from swiftgen.system.errors import SwiftgenError
from swiftgen.system.storage import expand_user

MAX_S = 120

Make = Callable[[Path], object]


def make_socket(path: Path) -> None:
    name = f"/proc/self/fd/{os.open(path.parent, os.O_RDONLY)}/{path.name}"  # the whole path may be too long
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)


KINDS: dict[str, Make] = {
    "pipe": os.mkfifo,
    "socket": make_socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "nothing": lambda path: path.symlink_to(path.with_name("gone")),
}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def nobody_waits() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(MAX_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., str]:
    """Runs a command that must be refused; returns its error."""
    import swiftgen

    monkeypatch.setitem(vars(swiftgen), "load", FakeLoad())
    monkeypatch.chdir(tmp_path)

    def run(*args: str | Path) -> str:
        capsys.readouterr()
        result = Outcome(main([str(arg) for arg in args]), *capsys.readouterr())
        lines = result.err.splitlines()
        assert (result.code, result.out) == (2, ""), result.err
        assert [line.split(":")[0] for line in lines] in (["error"], ["error", "hint"]), result.err
        return lines[0]

    return run


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    Document.create(path, manifest(), PROMPT).finish("stopped")
    return path


@kinds
@pytest.mark.parametrize("name", [MANIFEST_NAME, TOKENS_NAME, STEPS_NAME, LOCK_NAME])
def test_in_a_run_folder(kind: str, name: str, document: Path, refused: Callable[..., str]) -> None:
    file = run_folder(document) / name
    file.unlink()
    KINDS[kind](file)
    assert str(file) in refused("resume", "-q", document)
    if name not in (STEPS_NAME, LOCK_NAME):
        assert str(file) in refused("verify", "-q", document)
    assert "exists already" in refused("write", "-q", "-p", "x", "-o", document) or name == LOCK_NAME


@pytest.mark.parametrize("name", [TOKENS_NAME, STEPS_NAME, LOCK_NAME])
def test_a_link_in_a_run_folder_is_not_followed(
    name: str, document: Path, refused: Callable[..., str]
) -> None:
    file = run_folder(document) / name
    mine = document.with_name("mine")
    mine.write_bytes(b"no line break, and no multiple of 4")
    before = mine.read_bytes()
    file.unlink()
    file.symlink_to(mine)
    assert f"{file}: it is a symbolic link" in refused("resume", "-q", document)
    assert mine.read_bytes() == before


@kinds
def test_in_place_of_the_text(kind: str, document: Path, refused: Callable[..., str]) -> None:
    document.unlink()
    KINDS[kind](document)
    is_folder = kind == "folder"
    assert refused("resume", "-q", document) == f"error: {document} is not a regular file"
    said = refused("write", "-q", "-p", "x", "--force", "-o", document)
    assert said == f"error: {document} is {'a folder' if is_folder else 'not a regular file'}"


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/null", "/dev/fd/1"])
def test_stdout_has_a_name_of_its_own(name: str, refused: Callable[..., str]) -> None:
    assert refused("write", "-q", "-p", "x", "-o", name) == f"error: {name} is not a regular file"


@kinds
def test_in_place_of_a_prompt_or_preset(kind: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    file = tmp_path / "it.yaml"
    KINDS[kind](file)
    assert str(file) in refused("write", "-q", "--prompt-file", file)
    assert str(file) in refused("write", "-q", "-p", "x", "--preset", file)
    assert str(file) in refused("presets", file)


def test_a_pipe_of_the_shell_is_a_prompt(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As `--prompt-file <(command)` hands it over."""
    from swiftgen.commands.prompts import read_prompt

    reader, writer = os.pipe()
    thread = threading.Thread(target=lambda: (os.write(writer, b"Hello"), os.close(writer)))
    thread.start()
    assert read_prompt(None, Path(f"/dev/fd/{reader}"), False) == "Hello"
    thread.join()
    os.close(reader)


@pytest.mark.parametrize("name", ["~nobody-here/x", "~nobody-here\0/x", "\0", "~\0"])
def test_the_home_of_nobody_is_a_name_like_others(name: str, tmp_path: Path) -> None:
    from swiftgen.heads.files import load_heads
    from swiftgen.models.loading import open_model
    from swiftgen.training.texts import read_documents

    assert str(expand_user(name)) == name
    for call in (
        lambda: open_model(load_preset(None, {"model.source": name, "model.sha256": None}), local_only=True),
        lambda: load_heads(name),
        lambda: load_preset(f"{name}/y.yaml"),
        lambda: list(read_documents(name)),
    ):
        with pytest.raises(SwiftgenError):
            call()


@kinds
@pytest.mark.parametrize("where", ["file", "folder"])
def test_in_place_of_heads(kind: str, where: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "heads").mkdir()
    file = tmp_path / "heads" / WEIGHTS_FILE
    KINDS[kind](file)
    place = file if where == "file" else file.parent
    assert str(place) in refused("heads", "show", place)


@pytest.mark.parametrize("name", ["heads", "heads.safetensors"])
def test_what_is_here_is_no_name_of_the_hub(name: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    os.mkfifo(tmp_path / name)
    assert f"no draft heads at {name}" in refused("heads", "show", name)


@kinds
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "generation_config.json", "model.safetensors"]
)
@pytest.mark.usefixtures("cache")
def test_in_a_model_folder(
    kind: str,
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "model"
    save_model(folder)
    capsys.readouterr()
    (folder / name).unlink(missing_ok=True)
    KINDS[kind](folder / name)
    preset = tmp_path / "tiny.yaml"
    preset.write_text(f"model: {{source: {folder}, device: cpu, dtype: float32}}\n", encoding="utf-8")
    code = main(["write", "-q", "-n", "1", "-p", "he", "--preset", str(preset)])
    assert (code, "Traceback" in capsys.readouterr().err) in [(2, False), (0, False)]
    assert code == 2 or name == "generation_config.json"
