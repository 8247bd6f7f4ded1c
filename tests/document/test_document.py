"""A run on disk: what is written, in which order, and what happens when the disk fails."""

from __future__ import annotations

import errno
import json
import os
import struct
import zlib
from pathlib import Path

import pytest
import yaml

from support.documents import PROMPT, FailingFile, manifest, step
from swiftgen.document import document as document_module
from swiftgen.document.document import Document, check_output, read_tokens, run_folder
from swiftgen.document.manifest import read_manifest, write_manifest
from swiftgen.figures.metrics import RunMetrics
from swiftgen.system.errors import SwiftgenError


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_run_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    with Document.create(path, manifest(), PROMPT) as document:
        document.append(step([7], "Zo"))
        assert path.read_text("utf-8") == "Zo"  # visible at once, not at the end
        assert read_tokens(document.folder) == [*PROMPT, 7]
        assert read_manifest(document.folder).status == "running"
        document.append(step([8, 9], "ë\r\n"))
        assert document.num_tokens == 3
        document.finish("length")
    folder = tmp_path / "book.swiftgen"
    assert path.read_bytes() == "Zoë\r\n".encode()
    assert (folder / "tokens.bin").read_bytes() == struct.pack("<6I", *PROMPT, 7, 8, 9)
    assert (
        read_manifest(folder)
        == document.manifest
        == manifest(created=document.manifest.created).finished("length")
    )
    assert sorted(p.name for p in tmp_path.rglob("*")) == sorted(
        ["book.txt", "book.swiftgen", "run.yaml", "tokens.bin", "steps.jsonl", ".lock"]
    )


def test_records_about_once_a_second_with_the_checksum_of_the_log(tmp_path: Path) -> None:
    now_s = [0.0]
    metrics = RunMetrics(lambda: now_s[0])
    path = tmp_path / "book.txt"
    with Document.create(path, manifest(), PROMPT, metrics=metrics, clock=lambda: now_s[0]) as document:
        for token in range(35):
            now_s[0] += 0.125
            event = step([token], "x")
            metrics.observe(event)
            document.append(event)
        document.finish("length")
    records = [json.loads(line) for line in (run_folder(path) / "steps.jsonl").read_text().splitlines()]
    assert [record["num_tokens"] for record in records] == [0, 8, 16, 24, 32, 35]
    log = (run_folder(path) / "tokens.bin").read_bytes()
    for record in records:
        assert zlib.crc32(log[: 4 * record["log_tokens"]]) == record["log_crc32"]


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [(KeyboardInterrupt, "stopped", "interrupted"), (RuntimeError, "stopped", "error")],
)
def test_an_exception_keeps_everything_and_says_why(
    tmp_path: Path, error: type[BaseException], status: str, reason: str
) -> None:
    path = tmp_path / "book.txt"

    def fail_after_one_step() -> None:
        with Document.create(path, manifest(), PROMPT) as document:
            document.append(step([7], "seven"))
            raise error

    with pytest.raises(error):
        fail_after_one_step()
    saved = read_manifest(run_folder(path))
    assert (saved.status, saved.stop_reason) == (status, reason)
    assert path.read_text() == "seven"
    assert read_tokens(run_folder(path)) == [*PROMPT, 7]


def test_a_partial_last_record_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "tokens.bin"
    data = struct.pack("<3I", *PROMPT)
    for cut in range(len(data) + 1):
        log.write_bytes(data[:cut])
        assert read_tokens(tmp_path) == PROMPT[: cut // 4]


def test_a_run_can_be_opened_again_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    with Document.create(path, manifest(), PROMPT) as document:
        document.append(step([7], "a"))
    with Document(path, read_manifest(run_folder(path))) as document:
        document.append(step([8], "b"))
        document.finish("eos")
    assert path.read_text() == "ab"
    assert read_tokens(run_folder(path)) == [*PROMPT, 7, 8]
    assert read_manifest(run_folder(path)).status == "complete"


# --- a place that is taken ---------------------------------------------------------------------------


def finished_run(path: Path, text: str = "old") -> None:
    with Document.create(path, manifest(path.name), PROMPT) as document:
        document.append(step([9], text))
        document.finish("length")


def test_an_existing_document_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    finished_run(path)
    before = contents(tmp_path)
    with pytest.raises(SwiftgenError, match="exists already") as refusal:
        Document.create(path, manifest(), PROMPT)
    assert "--force" in refusal.value.hint
    path.rename(tmp_path / "kept.txt")  # the run folder alone is enough
    with pytest.raises(SwiftgenError, match=r"book\.swiftgen exists already"):
        Document.create(path, manifest(), PROMPT)
    (tmp_path / "kept.txt").rename(path)
    assert contents(tmp_path) == before

    with Document.create(path, manifest(), [1], force=True) as document:
        document.append(step([2], "new"))
    assert path.read_text() == "new"
    assert read_tokens(run_folder(path)) == [1, 2]


def test_force_replaces_a_plain_text_file_too(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("notes")
    with pytest.raises(SwiftgenError, match="exists already"):
        check_output(path, force=False)
    Document.create(path, manifest(), PROMPT, force=True).finish("error")
    assert path.read_text() == ""


def test_force_never_touches_what_is_not_a_run(tmp_path: Path) -> None:
    path, folder = tmp_path / "book.txt", tmp_path / "book.swiftgen"
    folder.mkdir()
    (folder / "notes.md").write_text("mine")
    with pytest.raises(SwiftgenError, match=r"notes\.md"):
        check_output(path, force=True)
    (folder / "notes.md").unlink()
    folder.rmdir()
    folder.write_text("a file")
    with pytest.raises(SwiftgenError, match="in the way"):
        check_output(path, force=True)
    folder.unlink()
    path.symlink_to(tmp_path / "elsewhere.txt")
    with pytest.raises(SwiftgenError, match="not a regular file"):
        check_output(path, force=True)
    with pytest.raises(SwiftgenError, match="not a regular file"):
        check_output(Path(os.devnull), force=True)


def test_two_texts_cannot_share_a_run_folder(tmp_path: Path) -> None:
    finished_run(tmp_path / "book.md")
    with pytest.raises(SwiftgenError, match=r"run folder of book\.md"):
        check_output(tmp_path / "book.txt", force=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "is a folder"),
        ("no/such/book.txt", "does not exist"),
        ("file/book.txt", "does not exist"),
        ("x.swiftgen", "kept for run folders"),
        ("x" * 300, "cannot write"),
        ("a\0b.txt", "null"),
    ],
)
def test_bad_places_are_refused_before_anything_is_written(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").write_text("")
    before = contents(tmp_path)
    with pytest.raises(SwiftgenError, match=message) as refusal:
        Document.create(tmp_path / name, manifest(), PROMPT)
    assert refusal.value.exit_code == 2
    assert contents(tmp_path) == before


def test_an_unwritable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # chmod does not stop root
    with pytest.raises(SwiftgenError, match="not writable"):
        check_output(tmp_path / "book.txt", force=False)


def test_a_failing_creation_leaves_the_old_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "book.txt"
    finished_run(path)
    before = contents(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(document_module, "write_synced", full)
    with pytest.raises(SwiftgenError, match="disk is full"):
        Document.create(path, manifest(), PROMPT, force=True)
    assert contents(tmp_path) == before


# --- a disk that fails while writing -----------------------------------------------------------------


@pytest.mark.parametrize("room", range(12))
def test_a_full_disk_keeps_whole_records_and_whole_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    path = tmp_path / "book.txt"
    monkeypatch.setattr("swiftgen.system.storage.FileIO", FailingFile)
    monkeypatch.setattr(FailingFile, "room", 10**9)

    def fill_the_disk() -> None:
        with Document.create(path, manifest(), PROMPT) as document:
            document.append(step([7], "é"))
            monkeypatch.setattr(FailingFile, "room", room)
            document.append(step([8, 9], "日本"))  # 8 bytes of tokens, 6 of text

    with pytest.raises(SwiftgenError, match="disk is full") as failure:
        fill_the_disk()
    assert failure.value.exit_code == 1
    assert path.read_text("utf-8") in ("é", "é日本")
    tokens = read_tokens(run_folder(path))
    assert tokens in ([*PROMPT, 7], [*PROMPT, 7, 8, 9])
    assert len(tokens) == 6 or path.read_text("utf-8") == "é"  # the text is never ahead of the log


def test_what_did_not_fit_is_written_when_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "book.txt"
    monkeypatch.setattr("swiftgen.system.storage.FileIO", FailingFile)
    monkeypatch.setattr(FailingFile, "room", 10**9)
    document = Document.create(path, manifest(), PROMPT)
    monkeypatch.setattr(FailingFile, "room", 3)
    with pytest.raises(SwiftgenError):
        document.append(step([8, 9], "日本"))
    monkeypatch.setattr(FailingFile, "room", 10**9)
    document.finish("error")
    assert path.read_text("utf-8") == "日本"
    assert read_tokens(document.folder) == [*PROMPT, 8, 9]


# --- run.yaml ----------------------------------------------------------------------------------------


def test_a_manifest_reads_back_equal(tmp_path: Path) -> None:
    original = manifest()
    write_manifest(tmp_path, original)
    assert read_manifest(tmp_path) == original
    assert os.listdir(tmp_path) == ["run.yaml"]


def test_a_failing_replacement_leaves_the_old_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_manifest(tmp_path, manifest())
    before = contents(tmp_path)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="broken"):
        write_manifest(tmp_path, manifest().finished("length"))
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "cannot read"),
        ({"status": "asleep"}, "damaged: status"),
        ({"seed": "1"}, "damaged: seed"),
        ({"colour": 1}, "damaged: colour"),
        ({"num_prompt_tokens": 0}, "damaged: num_prompt_tokens"),
        ({"format": 2}, "newer swiftgen"),
    ],
)
def test_a_damaged_manifest_is_one_line(
    tmp_path: Path, change: dict[str, object] | None, message: str
) -> None:
    if change is not None:
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(manifest().model_dump() | change))
    with pytest.raises(SwiftgenError, match=message):
        read_manifest(tmp_path)


@pytest.mark.parametrize("data", [b"", b"- 1\n", b"a: [", b"\xff\xfe", b"created: 2026-99-99", b"text"])
def test_a_manifest_that_is_no_manifest(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "run.yaml").write_bytes(data)
    with pytest.raises(SwiftgenError, match="damaged"):
        read_manifest(tmp_path)
