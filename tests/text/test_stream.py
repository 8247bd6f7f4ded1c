"""Streamed text equals decoding everything at once, whatever the tokens are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from support.documents import manifest, step
from swiftgen.document.document import Document, read_tokens, run_folder
from swiftgen.system.errors import SwiftgenError
from swiftgen.text.stream import TextStream

SAMPLE = "Zoë wrote: 日本語の本 👩‍👩‍👧‍👦 ﷽ naïve – \u202eabc\u202c x\u0301\r\n\tend \x00\ufffd"


def byte_level_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    merges = [("Ġ", "t"), ("h", "e"), ("Ã", "«"), ("ð", "Ł"), ("ðŁ", "ĳ"), ("æ", "Ĺ")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<é>"])
    tokenizer.add_tokens(["<tool call>", "ééé", AddedToken("<think>", special=False)])
    return tokenizer


def sentencepiece_tokenizer(decoder: Any) -> Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for piece in ["▁", "▁▁", "a", "▁a", "▁the", "é", "日", "a▁b", " ", "<0x4>", "<0xGG>", "▁<0x41>"]:
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def llama2_decoder() -> Any:
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


TOKENIZERS: dict[str, Tokenizer] = {
    "byte-level": byte_level_tokenizer(),
    "llama 2": sentencepiece_tokenizer(llama2_decoder()),
    "gemma": sentencepiece_tokenizer(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    ),
    "metaspace": sentencepiece_tokenizer(decoders.Metaspace()),
    "metaspace never": sentencepiece_tokenizer(decoders.Metaspace(prepend_scheme="never")),
    "metaspace bytes": sentencepiece_tokenizer(
        decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback()])
    ),
    "no decoder": sentencepiece_tokenizer(None),
}


def stream(tokenizer: Any, token_ids: list[int], chunk: int = 1) -> str:
    text = TextStream(tokenizer)
    parts = [text.push(token_ids[i : i + chunk]) for i in range(0, len(token_ids), chunk)]
    return "".join([*parts, text.finish()])


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(data=st.data(), chunk=st.integers(1, 5))
def test_any_tokens_stream_to_the_decoded_text(name: str, data: st.DataObject, chunk: int) -> None:
    tokenizer = TOKENIZERS[name]
    beyond = tokenizer.get_vocab_size() + 3  # models pad their vocabulary beyond the tokenizer's
    ids = data.draw(st.lists(st.integers(0, beyond), max_size=40))
    assert stream(tokenizer, ids, chunk) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["byte-level", "llama 2", "gemma"])
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30))
def test_any_text_split_over_tokens_comes_back(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert stream(tokenizer, ids) == tokenizer.decode(ids, skip_special_tokens=True)


def test_an_emoji_waits_for_its_last_byte() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("a👍b").ids
    text = TextStream(tokenizer)
    assert [text.push([token_id]) for token_id in ids] == ["a", *[""] * (len(ids) - 3), "👍", "b"]


def test_an_incomplete_character_at_the_end_is_one_replacement() -> None:
    text = TextStream(TOKENIZERS["byte-level"])
    ids = TOKENIZERS["byte-level"].encode("日").ids
    assert text.push(ids[:-1]) == ""
    assert text.finish() == "\ufffd"


def test_a_run_of_fallback_bytes_is_valid_or_not_as_a_whole() -> None:
    tokenizer = TOKENIZERS["llama 2"]
    euro = [3 + byte for byte in "€".encode()]
    letter = tokenizer.token_to_id("a")
    valid, invalid = TextStream(tokenizer), TextStream(tokenizer)
    assert [valid.push([i]) for i in [*euro, letter]] == ["", "", "", "€a"]
    assert [invalid.push([i]) for i in [*euro, 3 + 0xFF, letter]] == ["", "", "", "", "\ufffd" * 4 + "a"]


def test_only_the_first_space_of_the_text_is_dropped() -> None:
    tokenizer = TOKENIZERS["llama 2"]
    word = tokenizer.token_to_id("▁the")
    text = TextStream(tokenizer)
    assert [text.push([word]), text.push([1, word])] == ["the", " the"]


def test_decoders_that_cannot_be_streamed_are_refused() -> None:
    for decoder in [decoders.WordPiece(), decoders.CTC(), decoders.BPEDecoder()]:
        with pytest.raises(SwiftgenError, match="cannot be streamed exactly"):
            TextStream(sentencepiece_tokenizer(decoder))
    with pytest.raises(SwiftgenError, match="cannot stream"):
        TextStream(object())


@pytest.fixture(scope="module")
def real_tokenizer() -> Any:
    """The tokenizer of a real model, named by a folder in SWIFTGEN_TEST_MODEL."""
    folder = os.environ.get("SWIFTGEN_TEST_MODEL", "")
    if not (folder and (Path(folder) / "tokenizer.json").exists()):
        pytest.skip("SWIFTGEN_TEST_MODEL names no model folder")
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(folder)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_real_tokenizer_any_tokens(real_tokenizer: Any, data: st.DataObject) -> None:
    token_id = st.integers(0, len(real_tokenizer) + 5) | st.integers(0, 300)  # low ids: single bytes
    ids = data.draw(st.lists(token_id, max_size=60))
    whole = real_tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert stream(real_tokenizer, ids) == whole


def test_real_tokenizer_sample(real_tokenizer: Any) -> None:
    ids = real_tokenizer.encode(SAMPLE, add_special_tokens=False)
    assert stream(real_tokenizer, ids) == SAMPLE


SCRIPTS = {
    "Chinese": "日本語の本を読む。漢字𠮷野家",
    "emoji": "a👍🏽b 👩‍👩‍👧‍👦🇳🇴 ☕️",
    "combining marks": "x\u0301\u0323 e\u0301 नि ก็ \u1112\u1161\u11ab",
    "right to left": "שלום \u202eabc\u202c ﷽ العربية",
    "mixed": SAMPLE,
}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("name", ["byte-level", "llama 2", "gemma"])
@pytest.mark.parametrize("chunk", [1, 3])
def test_no_part_of_a_character_reaches_the_disk(name: str, script: str, chunk: int, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(SCRIPTS[script], add_special_tokens=False).ids
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    path, text = tmp_path / "book.txt", TextStream(tokenizer)
    num_held_back = 0
    with Document.create(path, manifest(), [5, 6, 7]) as document:
        for begin in range(0, len(ids), chunk):
            part = text.push(ids[begin : begin + chunk])
            document.append(step(ids[begin : begin + chunk], part))
            num_held_back += not part
            assert whole.startswith(path.read_bytes().decode("utf-8"))  # strict: half a character is an error
        document.append(step([], text.finish()))
        document.finish("length")
    assert path.read_bytes() == whole.encode()
    assert read_tokens(run_folder(path))[3:] == ids
    assert chunk > 1 or num_held_back > 3
