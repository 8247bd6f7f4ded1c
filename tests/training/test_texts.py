"""Training texts: what is read, how it is cut, what is kept, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from swiftgen.system.errors import SwiftgenError
from swiftgen.training.texts import Texts, load_texts, read_documents, save_texts, tokenise


class Letters:
    """A tokenizer with one token a character."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(character) for character in text]


def refused(data: Path | str) -> SwiftgenError:
    with pytest.raises(SwiftgenError) as caught:
        list(read_documents(str(data)))
    assert "\n" not in caught.value.message
    return caught.value


def texts_of(*documents: str, length: int, **options: Any) -> Texts:
    return tokenise(documents, Letters(), length, **options)


class TestReading:
    def test_a_folder_is_read_in_the_order_of_its_names(self, tmp_path: Path):
        (tmp_path / "sub").mkdir()
        (tmp_path / "sub" / "b.txt").write_text("second")
        (tmp_path / "a.jsonl").write_text('{"text": "first"}\n\n{"text": "and a half"}\n')
        (tmp_path / "c.png").write_bytes(b"\x89PNG")
        assert list(read_documents(str(tmp_path))) == ["first", "and a half", "second"]

    def test_a_byte_order_mark_is_no_text(self, tmp_path: Path):
        (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbftext")
        assert list(read_documents(str(tmp_path / "a.txt"))) == ["text"]

    def test_parquet_rows_are_documents(self, tmp_path: Path):
        datasets = pytest.importorskip("datasets")
        rows = {"short_book_title": ["A", "B"], "publication_date": [1901, 1902], "text": ["one", "two"]}
        datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "pg19.parquet")  # the columns of pg19
        assert list(read_documents(str(tmp_path / "pg19.parquet"))) == ["one", "two"]

    def test_parquet_without_text_is_refused(self, tmp_path: Path):
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_dict({"title": ["A"]}).to_parquet(tmp_path / "a.parquet")
        assert "row 1 has no text" in refused(tmp_path / "a.parquet").message

    def test_documents_are_read_one_by_one(self, tmp_path: Path):
        (tmp_path / "a.jsonl").write_text('{"text": "first"}\nnot json\n')
        documents = read_documents(str(tmp_path / "a.jsonl"))
        assert next(documents) == "first"
        with pytest.raises(SwiftgenError, match="line 2 is not JSON"):
            next(documents)

    @pytest.mark.parametrize("row", ["[]", '{"title": "x"}', '{"text": 3}', "null"])
    def test_rows_without_text_are_refused(self, tmp_path: Path, row: str):
        (tmp_path / "a.jsonl").write_text(f"{row}\n")
        assert "line 1 has no text" in refused(tmp_path / "a.jsonl").message

    def test_files_that_are_not_text_are_refused(self, tmp_path: Path):
        (tmp_path / "a.txt").write_bytes(b"abc\xff\xfe")
        assert "not UTF-8 text (byte 3)" in refused(tmp_path / "a.txt").message

    def test_folders_without_texts_and_names_of_nothing_are_refused(self, tmp_path: Path):
        assert "has no .txt" in refused(tmp_path).message
        assert "no file or folder" in refused(tmp_path / "nowhere").message


class TestCutting:
    def test_documents_are_cut_into_sequences_and_short_ends_are_left_out(self):
        texts = texts_of("a" * 250, "b" * 70, "c" * 63, length=100)
        assert texts.lengths.tolist() == [100, 100, 70]  # 50 and 63 tokens are too few
        assert texts.documents.tolist() == [0, 0, 1]
        assert texts.tokens[2].tolist() == [ord("b")] * 70 + [0] * 30
        assert texts.num_tokens == 270

    def test_the_paper_takes_the_first_sequence_of_long_documents(self):
        texts = texts_of("a" * 250, "b" * 70, "c" * 100, length=100, first_only=True)
        assert texts.documents.tolist() == [0, 2]
        assert texts.lengths.tolist() == [100, 100]

    def test_no_more_is_read_than_needed(self):
        def documents():
            yield "a" * 100
            yield "b" * 300
            pytest.fail("a third document was read")

        assert len(tokenise(documents(), Letters(), 100, max_sequences=3)) == 3

    @pytest.mark.parametrize("documents", [[], ["short", ""]])
    def test_too_little_text_is_refused(self, documents: list[str]):
        with pytest.raises(SwiftgenError, match="no text of 64 tokens"):
            texts_of(*documents, length=100)


class TestHoldingOut:
    def test_no_document_is_on_both_sides(self):
        texts = texts_of(*("x" * 250 for _ in range(40)), length=100)
        train, held_out = texts.split(0.1, seed=3)
        assert sorted([*train.tolist(), *held_out.tolist()]) == list(range(80))
        assert not set(texts.documents[train].tolist()) & set(texts.documents[held_out].tolist())
        assert len(texts.documents[held_out].unique()) == 4

    def test_the_split_depends_on_the_seed_alone(self):
        texts = texts_of(*("x" * 100 for _ in range(40)), length=100)
        splits = [texts.split(0.1, seed)[1].tolist() for seed in (1, 1, 2)]
        assert splits[0] == splits[1] != splits[2]

    def test_of_a_single_document_the_end_is_held_out(self):
        train, held_out = texts_of("x" * 1000, length=100).split(0.2, seed=0)
        assert (train.tolist(), held_out.tolist()) == (list(range(8)), [8, 9])

    def test_a_single_sequence_leaves_nothing_to_judge_by(self):
        with pytest.raises(SwiftgenError, match="one sequence"):
            texts_of("x" * 100, length=100).split(0.1, seed=0)


class TestKeeping:
    def test_texts_come_back_as_they_were(self, tmp_path: Path):
        texts, file = texts_of("a" * 250, length=100), tmp_path / "texts.safetensors"
        save_texts(texts, file, "weights-1", "some letters")
        loaded, description = load_texts(file, "weights-1", 128)
        assert description == "some letters"
        for name in ("tokens", "lengths", "documents"):
            assert torch.equal(getattr(loaded, name), getattr(texts, name))

    def test_texts_of_another_model_are_refused(self, tmp_path: Path):
        save_texts(texts_of("a" * 100, length=100), tmp_path / "t", "weights-1", "")
        with pytest.raises(SwiftgenError, match="another model"):
            load_texts(tmp_path / "t", "weights-2", 128)

    def test_token_ids_out_of_range_are_refused(self, tmp_path: Path):
        save_texts(texts_of("a" * 100, length=100), tmp_path / "t", "w", "")
        with pytest.raises(SwiftgenError, match="token ids the model does not know"):
            load_texts(tmp_path / "t", "w", ord("a"))

    def test_other_files_are_refused(self, tmp_path: Path):
        (tmp_path / "t").write_text(json.dumps({"not": "tensors"}))
        with pytest.raises(SwiftgenError, match="does not hold texts"):
            load_texts(tmp_path / "t", "w", 100)
        save_file({"x": torch.zeros(1)}, tmp_path / "t")
        with pytest.raises(SwiftgenError, match="does not hold texts"):
            load_texts(tmp_path / "t", "w", 100)
