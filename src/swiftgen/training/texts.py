"""Training text: documents from files, from a hub dataset or from the target itself, as token ids.

Files are UTF-8 `.txt` (one document each), `.jsonl` and `.parquet` (one document a row, in the column
`text`). `pg19` is the set of whole novels the paper trains on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from swiftgen.system.errors import SwiftgenError, first_line
from swiftgen.system.storage import expand_user, replace_file

PG19 = "pg19"
PG19_SOURCE = "emozilla/pg19"  # the set of DeepMind's repository as parquet, which needs no code of its own
TEXTS_FILE = "texts.safetensors"
MIN_TOKENS = 64
"""Shorter documents teach little and are left out."""
_SUFFIXES = (".txt", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Texts:
    """Sequences of token ids.

    Args:
        tokens: int32 `[N, S]`, padded with zeros.
        lengths: int64 `[N]`.
        documents: int64 `[N]`, which document a sequence is from.
    """

    tokens: Tensor
    lengths: Tensor
    documents: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens without the padding."""
        return int(self.lengths.sum())

    def split(self, held_out_share: float, seed: int) -> tuple[Tensor, Tensor]:
        """Sequences to train on and sequences to judge by, as indices; no document is in both.

        A single document is cut in two, its end held out.
        """
        documents = self.documents.unique()
        if len(documents) == 1:
            num_held_out = max(1, round(len(self) * held_out_share))
            if len(self) < 2:
                raise SwiftgenError(
                    "the data is one sequence, nothing is left to judge the heads by",
                    "give more text, or a smaller --sequence-length",
                )
            return torch.arange(len(self) - num_held_out), torch.arange(len(self) - num_held_out, len(self))
        order = documents[torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed))]
        held_out = torch.isin(self.documents, order[: max(1, round(len(order) * held_out_share))])
        return torch.nonzero(~held_out)[:, 0], torch.nonzero(held_out)[:, 0]


def read_documents(data: str) -> Iterator[str]:
    """The documents of `pg19`, of a file, or of all files in a folder, one by one.

    Raises:
        SwiftgenError: nothing to read, not text, a row without text, a missing package or no network.
    """
    if data == PG19:
        yield from _rows(PG19, PG19_SOURCE, split="train")
        return
    path = expand_user(data)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
        if not files:
            raise SwiftgenError(f"{data} has no {', '.join(_SUFFIXES)} files", "give a folder of texts")
    elif path.is_file():
        files = [path]
    else:
        raise SwiftgenError(
            f"there is no file or folder {data}", "--data takes pg19, self, a file or a folder"
        )
    for file in files:
        yield from _file_documents(file)


def _file_documents(file: Path) -> Iterator[str]:
    if file.suffix == ".parquet":
        yield from _rows(str(file), "parquet", data_files=str(file), split="train")
        return
    try:
        text = file.read_bytes().decode("utf-8").removeprefix("\ufeff")
    except OSError as error:
        raise SwiftgenError(f"cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SwiftgenError(
            f"{file} is not UTF-8 text (byte {error.start})", f"readable are {', '.join(_SUFFIXES)} files"
        ) from error
    if file.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SwiftgenError(f"{file}, line {number} is not JSON") from error
        yield _text_of(row, f"{file}, line {number}")


def _rows(name: str, source: str, **options: Any) -> Iterator[str]:
    """The column `text` of a dataset, streamed."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise SwiftgenError(
            f"reading {name} needs the package datasets", "pip install 'swiftgen[train]'"
        ) from error
    try:
        for number, row in enumerate(load_dataset(source, streaming=True, **options), start=1):
            yield _text_of(row, f"{name}, row {number}")
    except SwiftgenError:
        raise
    except Exception as error:  # the library raises kinds of its own, of pyarrow and of its HTTP client
        raise SwiftgenError(
            f"cannot read {name}: {first_line(error)}", "check the file or the network"
        ) from error


def _text_of(row: Any, where: str) -> str:
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise SwiftgenError(f"{where} has no text", 'every row needs a column "text"')
    return text


def tokenise(
    documents: Iterable[str],
    tokenizer: Any,
    sequence_length: int,
    max_sequences: int | None = None,
    first_only: bool = False,
) -> Texts:
    """Cut documents into sequences.

    Args:
        documents: Read one by one, no further than needed.
        max_sequences: Stop there; None reads everything.
        first_only: As in the paper: of each document longer than `sequence_length` its first sequence, the
            others are left out.

    Raises:
        SwiftgenError: if nothing is long enough.
    """
    rows: list[list[int]] = []
    sources: list[int] = []
    shortest = sequence_length if first_only else min(MIN_TOKENS, sequence_length)
    for number, document in enumerate(documents):
        ids: list[int] = tokenizer.encode(document, add_special_tokens=False)
        end = sequence_length if first_only else len(ids)
        for begin in range(0, min(end, len(ids)), sequence_length):
            part = ids[begin : begin + sequence_length]
            if len(part) >= shortest:
                rows.append(part)
                sources.append(number)
        if max_sequences is not None and len(rows) >= max_sequences:
            break
    if not rows:
        raise SwiftgenError(
            f"the data has no text of {shortest:,} tokens or more", "give more text, or longer documents"
        )
    rows, sources = rows[:max_sequences], sources[:max_sequences]
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return Texts(tokens, torch.tensor([len(row) for row in rows]), torch.tensor(sources))


def save_texts(texts: Texts, file: Path, fingerprint: str, description: str) -> None:
    """Keep texts with the model they are for."""
    tensors = {"tokens": texts.tokens, "lengths": texts.lengths, "documents": texts.documents}
    metadata = {"kind": "texts", "fingerprint": fingerprint, "data": description}
    replace_file(file, lambda temporary: save_file(tensors, temporary, metadata))


def load_texts(file: Path, fingerprint: str, vocab_size: int) -> tuple[Texts, str]:
    """Read texts and what they are, and check that they are for this model.

    Raises:
        SwiftgenError: damaged, or tokenised for another model.
    """
    try:
        with safe_open(file, framework="pt") as handle:
            metadata = handle.metadata() or {}
            texts = Texts(*(handle.get_tensor(name) for name in ("tokens", "lengths", "documents")))
    except (SafetensorError, OSError) as error:
        raise SwiftgenError(f"{file} does not hold texts: {first_line(error)}") from error
    if metadata.get("fingerprint") != fingerprint:
        raise SwiftgenError(f"{file} was tokenised for another model", "make it again with this preset")
    if not _are_sequences(texts, vocab_size):
        raise SwiftgenError(f"{file} is damaged: it has token ids the model does not know")
    return texts, metadata.get("data", "")


def _are_sequences(texts: Texts, vocab_size: int) -> bool:
    """Whether tensors from a file have the shapes, types and values of texts for a model."""
    tokens, lengths, documents = texts.tokens, texts.lengths, texts.documents
    whole_numbers = (torch.int32, torch.int64)
    if any(tensor.dtype not in whole_numbers for tensor in (tokens, lengths, documents)):
        return False
    if tokens.dim() != 2 or not tokens.numel() or not lengths.shape == documents.shape == tokens.shape[:1]:
        return False
    if not 1 <= int(lengths.min()) <= int(lengths.max()) <= tokens.shape[1]:
        return False
    return 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size
