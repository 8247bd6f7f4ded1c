"""Keeping a text in one alphabet: which tokens of a vocabulary belong to others.

Small models that write for a long time drift into other scripts, emoji and broken characters, and do not
come back.
"""

from __future__ import annotations

import unicodedata
from typing import Any

_ORDINALS = ("ª", "º", "µ")  # letters of no script by name


def foreign_tokens(tokenizer: Any, alphabet: str) -> set[int]:
    """Ids of tokens that `alphabet` ("any" or "latin") does not allow.

    With "latin", letters are Latin, and symbols are ASCII, currency or mathematical. A token that holds a
    part of a character only is not allowed: most other scripts are written with those.

    Args:
        tokenizer: a Hugging Face tokenizer with a `tokenizers` backend.
    """
    if alphabet == "any":
        return set()
    backend = tokenizer.backend_tokenizer
    texts = backend.decode_batch([[i] for i in range(len(tokenizer))], skip_special_tokens=False)
    return {i for i, text in enumerate(texts) if not (text.isascii() or all(map(_is_latin, text)))}


def _is_latin(character: str) -> bool:
    if character.isascii():
        return True
    category = unicodedata.category(character)
    if category.startswith("L"):
        return character in _ORDINALS or unicodedata.name(character, "").startswith("LATIN")
    return category[0] in "NPZ" or category in ("Sc", "Sm")
