"""Text from token ids as they arrive, equal to decoding all of them at once.

A token is not a piece of text: a character may be split over several tokens, a run of byte-fallback
tokens is one unit that is valid or not as a whole, and SentencePiece-style decoders drop the space
in front of the first word. Decoding a sliding window guesses at these borders (the incremental
decoder of the `tokenizers` library raises on runs of invalid byte-fallback tokens, for example).
Here the tokenizer's own decoder description is turned into the same steps in streaming form; each
keeps just the bytes whose text is still open, so the cost of a token never depends on the length
of the document.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from swiftgen.system.errors import SwiftgenError

PieceRule = Callable[[str, bool], str]  # (piece, is the first piece of the text) -> piece

_BYTE_FALLBACK_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"


class TextStream:
    """Turns a stream of token ids into newly final text.

    Over a whole document the pieces returned by `push` and `finish` add up to
    ``tokenizer.decode(all_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)``.
    Text that later tokens can still change is held back: an incomplete UTF-8 character, or an
    unfinished run of byte-fallback tokens.

    Args:
        tokenizer: a Hugging Face tokenizer with a `tokenizers` backend, or a `tokenizers.Tokenizer`.

    Raises:
        SwiftgenError: the tokenizer has no such backend or a decoder that cannot be streamed exactly.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if not hasattr(backend, "get_added_tokens_decoder"):
            raise SwiftgenError(
                f"the tokenizer ({type(tokenizer).__name__}) cannot stream its text",
                "use a model folder with a tokenizer.json file",
            )
        self._id_to_piece: Callable[[int], str | None] = backend.id_to_token
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._piece_rules, self._joiner, self._strip = _streaming_decoder(backend.decoder)
        self._at_start = True

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes the next tokens; returns the text that became final."""
        text = ""
        for token_id in token_ids:
            piece = None if token_id in self._special_ids else self._id_to_piece(token_id)
            if piece is None:  # special, or an id of the model's padding that the tokenizer does not know
                continue
            for rule in self._piece_rules:
                piece = rule(piece, self._at_start)
            self._at_start = False
            text += self._joiner.push(piece)
        return self._strip(text)

    def finish(self) -> str:
        """Ends the stream; returns what was held back, invalid bytes as U+FFFD."""
        return self._strip(self._joiner.finish())


class Joiner(Protocol):
    """Joins decoded pieces into text, holding back what is not final."""

    def push(self, piece: str) -> str: ...

    def finish(self) -> str: ...


class _PlainJoiner:
    """Pieces are text already; `separator` goes between them."""

    def __init__(self, separator: str = "") -> None:
        self._separator = separator
        self._next_separator = ""

    def push(self, piece: str) -> str:
        text = self._next_separator + piece
        self._next_separator = self._separator
        return text

    def finish(self) -> str:
        return ""


class _ByteLevelJoiner:
    """GPT-2 style pieces: every character stands for one byte of a UTF-8 text."""

    def __init__(self) -> None:
        # Python's incremental decoder replaces one maximal invalid part by one U+FFFD, as the
        # library's from_utf8_lossy does.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: str) -> str:
        try:
            data = bytes(map(_BYTE_OF_CHARACTER.__getitem__, piece))
        except KeyError:  # an added token is plain text if one of its characters is no byte character
            data = piece.encode("utf-8")
        return self._decoder.decode(data)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _ByteFallbackJoiner:
    """SentencePiece style pieces: text, and ``<0xE2>`` for a byte without a piece of its own.

    A run of byte pieces is text only if the whole run is valid UTF-8, else every byte of it becomes
    U+FFFD. So no character of a run is final before the run has ended.
    """

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, piece: str) -> str:
        match = _BYTE_FALLBACK_PIECE.fullmatch(piece)
        if match:
            self._run.append(int(match[1], 16))
            return ""
        return self.finish() + piece

    def finish(self) -> str:
        try:
            text = self._run.decode("utf-8")
        except UnicodeDecodeError:
            text = _REPLACEMENT * len(self._run)
        self._run.clear()
        return text


class _LeadingStrip:
    """Drops up to `count` times `content` from the front of the whole text."""

    def __init__(self, content: str, count: int) -> None:
        self._content = content
        self._left = count

    def __call__(self, text: str) -> str:
        while self._left and text:
            if not text.startswith(self._content):
                self._left = 0
                break
            text = text[len(self._content) :]
            self._left -= 1
        return text


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, the rest for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _byte_of_character()


def _streaming_decoder(decoder: Any) -> tuple[list[PieceRule], Joiner, Callable[[str], str]]:
    """The streaming form of a `tokenizers` decoder: rules per piece, a joiner, a final strip.

    Understood are the decoders of byte-level BPE and of SentencePiece-style tokenizers:
    ``(Replace | Metaspace)* (ByteLevel | ByteFallback)? Fuse? Strip?``, and no decoder at all.
    """
    if decoder is None:
        return [], _PlainJoiner(separator=" "), str
    steps = _flatten(json.loads(decoder.__getstate__()))
    refusal = SwiftgenError(
        f"the tokenizer's decoder ({', '.join(step['type'] for step in steps)}) cannot be streamed exactly",
        "byte-level BPE and SentencePiece-style tokenizers work; please report the model",
    )
    rules: list[PieceRule] = []
    while steps and steps[0]["type"] in _PIECE_RULES:
        rule = _PIECE_RULES[steps[0]["type"]](steps.pop(0))
        if rule is None:
            raise refusal
        rules.append(rule)
    joiner: Joiner = _PlainJoiner()
    fused = False
    if steps and steps[0]["type"] in _JOINERS:
        fused = steps[0]["type"] == "ByteLevel"
        joiner = _JOINERS[steps.pop(0)["type"]]()
    if steps and steps[0]["type"] == "Fuse":
        fused = True
        steps.pop(0)
    strip: Callable[[str], str] = str
    if fused and steps and steps[0]["type"] == "Strip" and not steps[0]["stop"]:
        spec = steps.pop(0)
        strip = _LeadingStrip(spec["content"], spec["start"])
    if steps:
        raise refusal
    return rules, joiner, strip


def _flatten(spec: dict[str, Any]) -> list[dict[str, Any]]:
    if spec["type"] != "Sequence":
        return [spec]
    return [step for part in spec["decoders"] for step in _flatten(part)]


def _replace_rule(spec: dict[str, Any]) -> PieceRule | None:
    pattern, content = spec["pattern"].get("String"), spec["content"]
    if not pattern:  # a regular expression of another engine
        return None
    return lambda piece, is_first: piece.replace(pattern, content)


def _metaspace_rule(spec: dict[str, Any]) -> PieceRule | None:
    mark = spec["replacement"]
    first = " " if spec.get("prepend_scheme") == "never" else ""
    return lambda piece, is_first: piece.replace(mark, first if is_first else " ")


_PIECE_RULES: dict[str, Callable[[dict[str, Any]], PieceRule | None]] = {
    "Replace": _replace_rule,
    "Metaspace": _metaspace_rule,
}
_JOINERS: dict[str, Callable[[], Joiner]] = {
    "ByteLevel": _ByteLevelJoiner,
    "ByteFallback": _ByteFallbackJoiner,
}
