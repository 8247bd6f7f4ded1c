"""Secrets that come along in what others say, in settings and in addresses: never shown, never kept."""

from __future__ import annotations

import os
import re

_HIDDEN = "***"
_MIN_CHARACTERS = 8  # of a secret in the environment; a shorter text may stand anywhere

_VARIABLE = re.compile(r".*(TOKEN|SECRET|PASSWORD|PASSWD|KEY)", re.IGNORECASE)
_PATTERNS = (
    re.compile(r"()\b(?:hf|api_org)_[A-Za-z0-9]{30,}"),  # tokens of the hub
    re.compile(r"(://)[^/\s@'\"]+(?=@)"),  # user and password in an address
    re.compile(r"([?&][^=&\s]*(?:token|secret|password|signature|credential|key)[^=&\s]*=)[^&\s'\"]+", re.I),
    re.compile(r"(\bbearer\s+)[^\s'\"]+", re.I),
)


def redacted(text: str) -> str:
    """The text without tokens of the hub, passwords in addresses, and secrets of the environment."""
    for name, value in os.environ.items():
        if len(value) >= _MIN_CHARACTERS and value in text and _VARIABLE.fullmatch(name):
            text = text.replace(value, _HIDDEN)
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\1{_HIDDEN}", text)
    return text


def has_secret(text: str) -> bool:
    """Whether `redacted` would change the text."""
    return redacted(text) != text
