"""What the tests of noise, history and sampler share: made-up texts and trees, and a limit for chance."""

from __future__ import annotations

import math
import random

from swiftgen.decoding.history import History
from swiftgen.forward.tree import DraftTree

VOCAB_SIZE = 60


def random_history(text: list[int]) -> History:
    history = History(200)
    history.extend(text[:1])
    history.extend(text[1:])
    return history


def random_tree(seed: int, root_token: int, num_nodes: int = 25) -> DraftTree:
    rng = random.Random(seed)
    tree = DraftTree(root_token, max_depth=6)
    while len(tree) < num_nodes:
        tree.add(rng.randrange(len(tree)), rng.randrange(VOCAB_SIZE), "base")
    return tree


def chi_square_limit(degrees: int) -> float:
    """Exceeded by chance in 1 of 10,000 cases (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.719 * math.sqrt(spread)) ** 3
