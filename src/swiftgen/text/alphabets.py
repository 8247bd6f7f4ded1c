"""Keeping a text in one alphabet, or in plain prose: which tokens of a vocabulary do not belong there.

Small models that write for a long time drift into other scripts, emoji and broken characters, and do not
come back. Kept from that they drift into lists, tables and capitals.
"""

from __future__ import annotations

import unicodedata
from itertools import pairwise
from typing import Any

_MARKS = " .,;:!?'\"()-–—‘’“”…%&$€£/"
_ONCE = "!?,;:-/%&$"
_ORDINALS = ("ª", "º", "µ")  # letters of no script by name


def foreign_tokens(tokenizer: Any, alphabet: str) -> set[int]:
    """Ids of tokens that `alphabet` ("any", "latin" or "prose") does not allow.

    With "latin", letters are Latin, and symbols are ASCII, currency or mathematical. A token that holds a
    part of a character only is not allowed: most other scripts are written with those. With "prose" a token
    also holds only the marks of running text, no line ends but those between paragraphs (single ones if the
    vocabulary has no other), no two capitals in a row, and few marks twice in a row.

    Args:
        tokenizer: a Hugging Face tokenizer with a `tokenizers` backend.
    """
    if alphabet == "any":
        return set()
    backend = tokenizer.backend_tokenizer
    texts = backend.decode_batch([[i] for i in range(len(tokenizer))], skip_special_tokens=False)
    if alphabet == "latin":
        return {i for i, text in enumerate(texts) if not _is_latin(text)}
    paragraph = "\n\n" if "\n\n" in texts else "\n"
    return {i for i, text in enumerate(texts) if not (text == paragraph or _is_prose(text))}


def _is_prose(text: str) -> bool:
    if not _is_latin(text) or not all(c.isalnum() or c in _MARKS for c in text):
        return False
    return not any((a.isupper() and b.isupper()) or (a == b and a in _ONCE) for a, b in pairwise(text))


def _is_latin(text: str) -> bool:
    return text.isascii() or all(map(_is_latin_character, text))


def _is_latin_character(character: str) -> bool:
    if character.isascii():
        return True
    category = unicodedata.category(character)
    if category.startswith("L"):
        return character in _ORDINALS or unicodedata.name(character, "").startswith("LATIN")
    return category[0] in "NPZ" or category in ("Sc", "Sm")
