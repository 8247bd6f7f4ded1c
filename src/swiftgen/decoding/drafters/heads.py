"""Drafts by the heads, level by level, each branch conditioned on its own tokens.

Straight from the verify pass: the hidden state of the last accepted token is there already, so no draft
pass is needed. After a draft pass (see `self_draft`), from the state that pass has made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from swiftgen.decoding.acceptance import calibrated
from swiftgen.decoding.drafters.base import Committed
from swiftgen.decoding.estimates import Estimates, Prior
from swiftgen.decoding.history import History
from swiftgen.decoding.sampling import Sampler
from swiftgen.forward.linear import MakeLinear, QuantisedLinear, linear_maker, replace_linears
from swiftgen.forward.target import Target
from swiftgen.forward.tree import DraftTree
from swiftgen.heads.modules import DraftHeads, RecurrentHeads
from swiftgen.models.gguf_weights import attach, packed_of, table_of
from swiftgen.models.tensor_parallel import whole
from swiftgen.native.kernels import Kernels
from swiftgen.native.structs import Cell, Norm, Product
from swiftgen.native.weights import GROUP, Q8_0, rows_in_8_bits
from swiftgen.system.devices import send

SOURCE = "heads"
CPU = torch.device("cpu")
PRIOR = Prior(share=0.2, hit=0.35, best_hit=0.5)
BIAS = -1.5
"""See `calibrated`: of ten drafts one is right with a share of 0.1, two with 0.5, six with 0.99."""


class ReadyHeads:
    """Heads with the parts of the target they share, ready to draft.

    Args:
        heads: Of the target; moved to its device and dtype.
        embedding, lm_head: The target's own.
        kernels: With them the heads are computed in 8 bits: drafts need not be exact, but quick.
    """

    def __init__(
        self,
        heads: DraftHeads,
        embedding: nn.Embedding,
        lm_head: nn.Linear,
        kernels: Kernels | None = None,
    ) -> None:
        weight = lm_head.weight
        device = CPU if packed_of(lm_head) else weight.device  # a packed weight is nowhere else
        self.heads = heads.to(device, weight.dtype).requires_grad_(False)
        self.num_heads, self.vocabulary = heads.num_heads, heads.vocabulary
        self._embedding = embedding
        self._lm_head: nn.Module | None = None  # cut to the vocabulary
        make = _quick_linear_maker(device, weight.dtype, kernels)
        if self.vocabulary is not None:
            self._lm_head = make(_rows_of(lm_head, self.vocabulary, kernels))
        replace_linears(self.heads, make)
        self._kernels, self._cell = kernels, self._native_cell()

    def _native_cell(self) -> Cell | None:
        """The recurrent cell for the kernels; None if some part of it is of a kind they do not know."""
        heads, embedding, lm_head = self.heads, self._embedding, self._lm_head
        table = table_of(embedding)
        if not isinstance(heads, RecurrentHeads) or table is None:
            return None
        linears = [heads.gate_up, heads.down, lm_head]
        products = [linear.product for linear in linears if isinstance(linear, QuantisedLinear)]
        if len(products) < len(linears):
            return None
        norms = heads.state_norm, heads.token_norm, heads.post_norm
        return Cell([Norm(norm.weight, heads.eps) for norm in norms], *table, *products)

    def step(
        self, states: Tensor, token_ids: Sequence[int], depth: int, target: Target
    ) -> tuple[Tensor, Tensor]:
        """States one position on, `[N, hidden]`, and the float32 logits there, `[N, vocab]`.

        With a draft vocabulary the logits are over its tokens and one column for all others.
        """
        ids = send(torch.tensor(token_ids), states.device)
        if self._kernels and self._cell and self.vocabulary is not None:
            states, logits = self._kernels.advance(self._cell, states, ids, len(self.vocabulary) + 1)
            return states, target.finish_logits(logits)
        states = self.heads.advance(states, self._embedding(ids), depth)
        outputs = self.heads.output(states, depth)
        if self._lm_head is None or self.vocabulary is None:
            return states, target.unembed(outputs)
        logits = self._lm_head(outputs)[:, : len(self.vocabulary) + 1]
        return states, target.finish_logits(logits.float())

    @property
    def cut_lm_head(self) -> tuple[Product, int] | None:
        """The lm_head for the vocabulary, if it has few bits, and how many of its columns are logits."""
        if self.vocabulary is None or not isinstance(self._lm_head, QuantisedLinear):
            return None
        return self._lm_head.product, len(self.vocabulary) + 1

    def sampler(self, sampler: Sampler, vocab_size: int) -> Sampler:
        """The sampler that ranks what `step` gives."""
        return sampler if self.vocabulary is None else sampler.restricted_to(self.vocabulary, vocab_size)


class HeadsDrafter:
    """Grows a tree with the heads.

    Args:
        widths: Children below each node, level by level; levels beyond the heads are left out.
        beam: Nodes of a level that get children, the likeliest first; None is all of them.
        floor: Nodes less likely than this to be accepted with their path get none.
        estimates: Another level is made while it promises more tokens than its time, and that of a row to
            verify, is worth; None makes all.
    """

    def __init__(
        self,
        target: Target,
        sampler: Sampler,
        heads: ReadyHeads,
        widths: Sequence[int],
        beam: int | None,
        floor: float = 0.0,
        estimates: Estimates | None = None,
    ) -> None:
        self._target = target
        self._heads = heads
        self._sampler = heads.sampler(sampler, target.config.vocab_size)
        self._widths = list(widths)[: heads.num_heads]
        self._beam = beam
        self._floor = floor
        self._level = estimates.level(SOURCE, PRIOR) if estimates else None
        self._state: Tensor | None = None

    @torch.inference_mode()
    def propose(self, tree: DraftTree, history: History) -> None:
        """Draft from the state of the last verify pass."""
        if self._state is not None:
            self.grow(tree, history, [0], self._state)

    def promise(self) -> float:
        """Of levels below the root."""
        return self._level.promise(len(self._widths)) if self._level and self._state is not None else 0.0

    def observe(self, committed: Committed) -> None:
        """Keep the state of the last token in the cache."""
        self._state = committed.state

    def grow(
        self, tree: DraftTree, history: History, nodes: list[int], state: Tensor, chance: float = 1.0
    ) -> None:
        """Add levels below `nodes`, which are children of one node or that node itself.

        Args:
            state: Hidden state of the target at the position before them, `[hidden]`.
            chance: Of their parent to be accepted.
        """
        states = state.expand(len(nodes), -1)
        joint = [chance * self._chance(tree, node) for node in nodes]
        for depth, width in enumerate(self._widths, start=1):
            if not nodes or tree.depths[nodes[0]] >= tree.max_depth:
                return
            parents, num_rows = sum(joint), tree.depths[nodes[0]] + 1
            is_first = nodes == [0]  # whether to draft at all is the planner's
            if self._level and not is_first and not self._level.is_worth(parents, num_rows):
                return
            elapsed = self._level.start() if self._level else None
            states, logits = self._heads.step(states, [tree.tokens[n] for n in nodes], depth, self._target)
            position = len(history) + tree.depths[nodes[0]]
            windows = history.windows(tree, self._sampler.W, nodes)
            ranked = self._sampler.rank(logits, torch.full((len(nodes),), position), windows, width)
            children = [
                (joint[row] * self._chance(tree, child), row, child)
                for row, candidates in enumerate(ranked)
                for token, confidence in candidates
                if (child := tree.add(nodes[row], token, SOURCE, calibrated(confidence, BIAS))) is not None
            ]
            children = [child for child in sorted(children, reverse=True) if child[0] >= self._floor]
            children = children[: self._beam]
            joint = [chance for chance, _, _ in children]
            if self._level and elapsed:
                self._level.observe(elapsed(), self._level.gain(joint, num_rows) / parents)
            rows = torch.tensor([row for _, row, _ in children], dtype=torch.int64)
            states = states[send(rows, states.device)]
            nodes = [child for _, _, child in children]

    def _chance(self, tree: DraftTree, node: int) -> float:
        """How likely a node is right if its parent is."""
        return self._level.chance(tree, node) if self._level else tree.chances[node]


def _quick_linear_maker(device: torch.device, dtype: torch.dtype, kernels: Kernels | None) -> MakeLinear:
    make = linear_maker(device, dtype, kernels, is_integer=True)

    def make_quick(linear: nn.Linear, *, is_fine: bool = False, is_wide: bool = False) -> nn.Module:
        if kernels and kernels.can_pack(Q8_0, linear.out_features, linear.in_features):
            attach(linear, [kernels.pack(Q8_0, rows_in_8_bits(linear.weight), linear.in_features)])
        return make(linear, is_wide=is_wide)

    return make_quick


def _rows_of(lm_head: nn.Linear, vocabulary: Tensor, kernels: Kernels | None) -> nn.Linear:
    """The lm_head for some tokens, then one column that stands for all others, then what fills a group."""
    num_rows = -(-(len(vocabulary) + 1) // GROUP) * GROUP
    rows = nn.Linear(lm_head.in_features, num_rows, bias=lm_head.bias is not None, device="meta")
    fill = 0, num_rows - len(vocabulary)
    if kernels and (weights := packed_of(lm_head)):
        weight = kernels.unpack(weights[0], vocabulary).to(lm_head.weight.dtype)
    else:
        weight = whole(lm_head.weight)[vocabulary]
    rows.weight = nn.Parameter(pad(weight, (0, 0, *fill)), requires_grad=False)
    if lm_head.bias is not None:
        rows.bias = nn.Parameter(pad(whole(lm_head.bias)[vocabulary], fill), requires_grad=False)
    return rows
