"""From a prompt to token ids, and tokens that are none of a text."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from swiftgen.system.errors import SwiftgenError


def encode(tokenizer: Any, prompt: str, is_chat: bool, system: str | None, source: str) -> list[int]:
    """Token ids of a prompt.

    Args:
        is_chat: whether it goes through the model's chat template.
        system: system prompt of the chat.
        source: of the model, for messages.

    Raises:
        SwiftgenError: the prompt is empty, or the model has no chat template.
    """
    if not prompt:
        raise SwiftgenError("the prompt is empty", "give some text with --prompt, --prompt-file or stdin")
    if not is_chat:
        token_ids: list[int] = tokenizer.encode(prompt)
    else:
        token_ids = _encode_chat(tokenizer, prompt, system, source)
    if not token_ids:
        raise SwiftgenError("the prompt has no tokens", "give some text with --prompt or --prompt-file")
    return token_ids


def special_tokens(tokenizer: Any, suppress: Collection[int], vocab_size: int) -> set[int]:
    """Ids of control tokens, and those without a token.

    Raises:
        SwiftgenError: one of `suppress` is no id of the model.
    """
    if wrong := [i for i in suppress if i >= vocab_size]:
        raise SwiftgenError(
            f"suppress names token {wrong[0]}, the model has {vocab_size:,}",
            f"allowed are ids from 0 to {vocab_size - 1}",
        )
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {i for i in special if i < vocab_size} | set(range(len(tokenizer), vocab_size))


def _encode_chat(tokenizer: Any, prompt: str, system: str | None, source: str) -> list[int]:
    if not tokenizer.chat_template:
        raise SwiftgenError(f"{source} has no chat template", "write raw text with --raw")
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    token_ids: list[int] = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return token_ids
