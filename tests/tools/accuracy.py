"""What an arithmetic costs: perplexity and KL against the unpacked model in float32, and equal greedy tokens.

    python tests/tools/accuracy.py --text emma.txt --text persuasion.txt --tokens 20000
    python tests/tools/accuracy.py --own --tokens 5000

Texts are read in pieces of 1,024 tokens, by the passes that writing uses. With --own the model writes one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from swiftgen.commands.process import load_engine
from swiftgen.engine import Engine
from swiftgen.forward.cache import FullCache
from swiftgen.forward.target import Target
from swiftgen.forward.tree import DraftTree
from swiftgen.models.loading import load_weights, open_model
from swiftgen.settings.presets import load_preset

PIECE = 1024
ARITHMETICS = {"bfloat16, full": "full", "8-bit activations": "int8"}


def pieces(token_ids: list[int], num_tokens: int) -> Iterator[list[int]]:
    """Pieces of a text, spread over it."""
    count = max(1, min(num_tokens, len(token_ids)) // PIECE)
    step = len(token_ids) // count
    for i in range(count):
        yield token_ids[i * step : i * step + PIECE]


@torch.inference_mode()
def logits_of(target: Target, token_ids: list[int]) -> Tensor:
    """Of a piece, by chains of the largest pass: float32 `[T, vocab]`."""
    cache = FullCache(target.cache_shape, len(token_ids) + 2 * target.max_rows)
    rows = []
    while (done := cache.length) < len(token_ids):
        chain = token_ids[done : done + min(target.max_rows, 128 - done % 128)]
        tree = DraftTree(chain[0], max_depth=len(chain))
        tree.add_path(0, chain[1:], "text")
        rows.append(target.forward(tree, done, cache).logits())
        cache.commit(range(len(chain)))
    return torch.cat(rows)


class Sums:
    """What is counted over the tokens of a text."""

    def __init__(self) -> None:
        self.num_tokens = self.num_equal = 0
        self.loss = self.divergence = 0.0

    def add(self, logits: Tensor, reference: Tensor, token_ids: list[int]) -> None:
        """Count one piece."""
        own, exact = logits[:-1].log_softmax(-1), reference[:-1].log_softmax(-1)
        next_ids = torch.tensor(token_ids[1:]).unsqueeze(1)
        self.num_tokens += len(next_ids)
        self.loss -= float(own.gather(1, next_ids).double().sum())
        self.divergence += float((exact.exp() * (exact - own)).double().sum())
        self.num_equal += int((own.argmax(-1) == exact.argmax(-1)).sum())

    def figures(self) -> dict[str, float]:
        """Per token."""
        return {
            "perplexity": round(float(torch.tensor(self.loss / self.num_tokens).exp()), 4),
            "mean_kl": round(self.divergence / self.num_tokens, 5),
            "same_greedy": round(self.num_equal / self.num_tokens, 4),
        }


def target_of(preset: str | None, activations: str) -> Target:
    """The target under an arithmetic."""
    engine = load_engine(load_preset(preset, {"model.activations": activations, "heads": None}))
    engine.prepare(PIECE, 1)
    return engine._prepared.target


def own_text(engine: Engine, num_tokens: int) -> list[int]:
    """What the model writes of a story."""
    prompt = engine.encode("Write a long novel about a lighthouse keeper.")
    events = engine.stream(prompt, num_tokens=num_tokens - len(prompt), seed=1)
    return [*prompt, *(token for event in events for token in event.token_ids)]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset")
    parser.add_argument("--text", action="append", default=[], type=Path)
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--tokens", type=int, default=20_000)
    args = parser.parse_args()
    engine = load_engine(load_preset(args.preset, {}))
    texts = {path.stem: engine.tokenizer.encode(path.read_text(encoding="utf-8")) for path in args.text}
    if args.own:
        texts["own text"] = own_text(engine, args.tokens)
    exact: Any = load_weights(open_model(load_preset(args.preset, {"model.dtype": "float32"}))).model
    targets = {name: target_of(args.preset, key) for name, key in ARITHMETICS.items()}
    result: dict[str, Any] = {}
    for title, token_ids in texts.items():
        sums = {name: Sums() for name in ("float32", *targets)}
        for piece in tqdm(list(pieces(token_ids, args.tokens)), desc=title, file=sys.stderr):
            reference = exact(torch.tensor([piece]), use_cache=False).logits[0].float()
            sums["float32"].add(reference, reference, piece)
            for name, target in targets.items():
                sums[name].add(logits_of(target, piece), reference, piece)
        result[title] = {name: each.figures() for name, each in sums.items()}
        for name, figures in result[title].items():
            print(f"{title:18} {name:20} {figures}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
