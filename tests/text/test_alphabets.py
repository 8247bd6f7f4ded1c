"""Which tokens of a vocabulary belong to other scripts."""

from __future__ import annotations

import pytest

from swiftgen.text.alphabets import foreign_tokens

TEXTS = {
    "plain": [
        " the",
        "Zoë",
        "naïve",
        "ŵ",
        "ª",
        "ß",
        "12",
        "½",
        "\n\n",
        " ",
        "(",
        "“quoted”",
        "— ",
        "…",
        "€5",
        "±2",
        "~^`",
    ],
    "foreign": ["я", "λ", "日本", "한", "ش", "🙂", "a🙂", "\ufffd", " \ufffd", "°", "©", "e\u0301", "→и"],
}


class Vocabulary:
    """Looks like a tokenizer whose tokens are these texts."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts
        self.backend_tokenizer = self

    def __len__(self) -> int:
        return len(self._texts)

    def decode_batch(self, sequences: list[list[int]], skip_special_tokens: bool) -> list[str]:
        assert not skip_special_tokens
        return [self._texts[token] for (token,) in sequences]


@pytest.mark.parametrize("text", TEXTS["plain"])
def test_latin_text_stays(text: str):
    assert foreign_tokens(Vocabulary([text]), "latin") == set()


@pytest.mark.parametrize("text", TEXTS["foreign"])
def test_other_scripts_emoji_and_parts_of_characters_go(text: str):
    assert foreign_tokens(Vocabulary(["a", text, "b"]), "latin") == {1}


PROSE = {
    "plain": [
        " the",
        "Zoë",
        "naïve",
        "12",
        "\n\n",
        " ",
        "(",
        ' "',
        "“quoted”",
        "—",
        "...",
        "…",
        "€5",
        "A",
        "iPhone",
    ],
    "foreign": [
        *("\n", "\n\n\n", "\n   ", "\t", "**", "#", "|", "•", "*", "_", "`", "<", "[", "=", "+", "±"),
        *("THE", "USA", "GPS1", "!!", "??", "--", "::", "//", "я", "🙂", "\ufffd"),
    ],
}


@pytest.mark.parametrize("text", PROSE["plain"])
def test_running_text_is_prose(text: str):
    assert foreign_tokens(Vocabulary([text]), "prose") == set()


@pytest.mark.parametrize("text", PROSE["foreign"])
def test_markup_line_ends_capitals_and_repeated_marks_are_not_prose(text: str):
    assert foreign_tokens(Vocabulary(["a", text, "\n\n"]), "prose") == {1}


def test_a_vocabulary_without_paragraph_ends_may_end_lines():
    assert foreign_tokens(Vocabulary(["a", "\n", "\n "]), "prose") == {2}


def test_any_alphabet_asks_for_nothing():
    assert foreign_tokens(None, "any") == set()
