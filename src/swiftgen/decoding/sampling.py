"""Sampling by keyed noise: which token follows depends on the logits, the position and the seed alone.

The token at absolute position p is `argmax(processed_logits + g(seed, p, token))`, where `g` is Gumbel
noise from a counter-based hash: an exact sample of the processed distribution without generator state.
Target and drafters use the same noise, so drafts aim at the token the target will pick.

Order of the processors as in transformers: penalty, suppressed tokens, temperature, top-k, top-p,
min-p, eta. Everything is computed per row and never across rows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from swiftgen.decoding.noise import keyed_gumbel
from swiftgen.system.devices import send

if TYPE_CHECKING:
    from swiftgen.native.kernels import Kernels
    from swiftgen.settings.schema import SamplerSettings

NEG_INF = float("-inf")
_TOP_P_CANDIDATES = 1024
_CONFIDENCE_WIDTH = 8  # candidates that share the confidence of a draft
_LOGIT_SLACK = 1e-4
_PICKED_ROWS = 64


class Candidate(NamedTuple):
    """A drafted token.

    Args:
        token: Its id.
        confidence: Its share among the candidates, noise included: 1 where nothing comes near it.
    """

    token: int
    confidence: float


class Sampler:
    """Processes logits and picks or ranks tokens with keyed noise.

    Args:
        W, theta: Contextual penalty: the last `W` tokens, penalty value `theta` (1 is off).
        suppressed: Token ids that are never written.
        kernels: Do what concerns all of the vocabulary, where there are any.
    """

    def __init__(
        self,
        settings: SamplerSettings,
        seed: int,
        W: int,
        theta: float,
        suppressed: Collection[int] = (),
        kernels: Kernels | None = None,
    ) -> None:
        self.settings = settings
        self.seed = seed
        self.W = W if theta != 1.0 else 0
        self.theta = theta
        self._suppressed = torch.tensor(sorted(set(suppressed)), dtype=torch.int64)
        self._tokens: Tensor | None = None  # of the columns; None: each column is the token of its number
        self._columns: Tensor | None = None
        self._kernels = kernels
        self._bias: Tensor | None = None  # of the suppressed columns, made on first use

    def restricted_to(self, vocabulary: Tensor, vocab_size: int) -> Sampler:
        """The same sampler for logits over a few tokens only, to rank drafts.

        Args:
            vocabulary: int64 `[V]`, the token of each column. One more column follows, which stands for all
                other tokens and is never chosen.
        """
        restricted = copy.copy(self)
        restricted._tokens = torch.cat([vocabulary, vocabulary[-1:]])  # the last column is never asked for
        restricted._columns = torch.full((vocab_size,), len(vocabulary), device=vocabulary.device)
        restricted._columns[vocabulary] = torch.arange(len(vocabulary), device=vocabulary.device)
        others = torch.tensor([len(vocabulary)], device=vocabulary.device)
        suppressed = restricted._columns[self._suppressed.to(vocabulary.device)]
        restricted._suppressed = torch.cat([suppressed, others]).unique()
        restricted._bias = None
        return restricted

    @torch.inference_mode()
    def pick(self, logits: Tensor, positions: Tensor, windows: Tensor) -> list[int]:
        """The target's token after each row; positions are those of the tokens to be picked.

        Args:
            logits: float32 `[T, vocab]`, overwritten.
            positions: int64 `[T]`.
            windows: int64 `[T, window]`, from `History.windows`.
        """
        picks: list[int] = []
        # In parts, so that what is made of the logits of a very wide tree takes no more memory than they do.
        for first in range(0, len(logits), _PICKED_ROWS):
            part = slice(first, first + _PICKED_ROWS)
            scores, ids = self.scores(logits[part], positions[part], windows[part])
            picks += ids[scores.argmax(dim=-1)].tolist()
        return picks

    @torch.inference_mode()
    def rank(self, logits: Tensor, positions: Tensor, windows: Tensor, width: int) -> list[list[Candidate]]:
        """The `width` most promising tokens of each row, best first; fewer where fewer can occur."""
        scores, ids = self.scores(logits, positions, windows)
        top = scores.topk(min(max(width, _CONFIDENCE_WIDTH), scores.shape[1]), dim=-1)
        # In one copy, for which alone a GPU is waited for; ids are exact in float64.
        found = torch.stack([ids[top.indices].double(), top.values]).tolist()
        return [_candidates(*row)[:width] for row in zip(*found, strict=True)]

    @torch.inference_mode()
    def scores(self, logits: Tensor, positions: Tensor, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Processed logits plus noise, and which tokens they are of.

        Returns:
            float64 `[T, C]`, -inf where a token cannot occur, and the ids of the C tokens that can occur in
            some row, ascending.
        """
        positions, windows = send(positions, logits.device), send(windows, logits.device)
        columns = self._narrowed(logits, windows)
        ids = columns if self._tokens is None else self._tokens[columns]
        if (kernels := self._usable_kernels(logits)) and not self.settings.top_k:
            s = self.settings
            return kernels.score(logits, columns, ids, positions, self.seed, s.temperature, s.min_p), ids
        if len(columns) < logits.shape[1]:
            logits = logits.index_select(1, columns)
        processed = self._filtered(logits)
        if self.settings.temperature == 0:
            return processed.double(), ids
        if logits.is_cuda:  # to ask which tokens can occur would wait for the device
            scores = processed.double() + keyed_gumbel(self.seed, positions.unsqueeze(1), ids)
            return torch.where(processed > NEG_INF, scores, NEG_INF), ids
        rows, places = torch.nonzero(processed > NEG_INF, as_tuple=True)
        noise = keyed_gumbel(self.seed, positions[rows], ids[places])
        scores = torch.full_like(processed, NEG_INF, dtype=torch.float64)
        scores[rows, places] = processed[rows, places].double() + noise
        return scores, ids

    def process(self, logits: Tensor, windows: Tensor) -> Tensor:
        """Penalty, suppression, temperature and filters; float32 `[T, vocab]`, in place."""
        self._penalise_and_suppress(logits, send(windows, logits.device))
        return self._filtered(logits)

    def _penalise_and_suppress(self, logits: Tensor, windows: Tensor) -> None:
        """In place."""
        if self.W:
            penalise(logits, windows if self._columns is None else self._columns[windows], self.theta)
        if len(self._suppressed):
            if self._suppressed.device != logits.device:
                self._suppressed = send(self._suppressed, logits.device)
            logits.index_fill_(1, self._suppressed, NEG_INF)

    def _narrowed(self, logits: Tensor, windows: Tensor) -> Tensor:
        """Penalty and suppression in place, and the columns that may pass the filters in some row.

        A few where min-p decides, int64 ascending. That spares the filters and the noise the rest of the
        vocabulary. Top-p and eta need all of it, and so does a GPU, which alone knows how many are left.
        """
        s = self.settings
        if logits.is_cuda or not self._min_p_decides:
            self._penalise_and_suppress(logits, windows)
            return torch.arange(logits.shape[1], device=logits.device)
        reach = -s.temperature * math.log(s.min_p)
        if kernels := self._usable_kernels(logits):
            windows = windows if self._columns is None else self._columns[windows]
            windows = windows[:, : windows.shape[1] if self.W else 0].contiguous()
            return kernels.narrow(
                logits, windows, self.theta, self._suppression(logits.shape[1]), reach, _LOGIT_SLACK
            )
        self._penalise_and_suppress(logits, windows)
        largest = logits.amax(dim=-1, keepdim=True)
        slack = _LOGIT_SLACK * (1.0 + largest.abs())  # for the rounding of the temperature
        limit = largest - reach - slack
        return torch.nonzero((~(logits < limit)).any(dim=0))[:, 0]  # so that NaN stays, for the filters

    @property
    def _min_p_decides(self) -> bool:
        """Whether no token that min-p excludes can be chosen, and no other filter looks at them."""
        s = self.settings
        return bool(s.temperature and s.min_p and s.top_p >= 1 and not s.eta and s.min_tokens_to_keep == 1)

    def _usable_kernels(self, logits: Tensor) -> Kernels | None:
        """The kernels, where they can narrow and score these logits."""
        fits = self._min_p_decides and logits.device.type == "cpu" and logits.is_contiguous()
        return self._kernels if fits else None

    def _suppression(self, num_columns: int) -> Tensor:
        if self._bias is None:
            self._bias = torch.zeros(num_columns).index_fill_(0, self._suppressed, NEG_INF)
        return self._bias

    def _filtered(self, logits: Tensor) -> Tensor:
        """Temperature and filters, in place."""
        s = self.settings
        if s.temperature == 0:
            return logits
        logits /= s.temperature
        if 0 < s.top_k < logits.shape[1]:
            keep_at_least(logits, max(s.top_k, s.min_tokens_to_keep))
        for limit in (self._top_p_limit, self._min_p_limit, self._eta_limit):
            threshold = limit(logits)
            if threshold is not None:
                logits.masked_fill_(logits < self._at_least(logits, threshold), NEG_INF)
        return logits

    def _at_least(self, logits: Tensor, threshold: Tensor) -> Tensor:
        """Lower a row's threshold to its `min_tokens_to_keep`-th largest logit."""
        if self.settings.min_tokens_to_keep == 1:
            return torch.minimum(threshold, logits.amax(dim=-1, keepdim=True))
        kept = logits.topk(min(self.settings.min_tokens_to_keep, logits.shape[1]), dim=-1).values[:, -1:]
        return torch.minimum(threshold, kept)

    def _top_p_limit(self, logits: Tensor) -> Tensor | None:
        """Logit of the last token of the smallest set whose probability reaches `top_p`, `[T, 1]`."""
        if self.settings.top_p >= 1.0:
            return None
        total = torch.logsumexp(logits.double(), dim=-1, keepdim=True)
        # On a GPU it would take a wait to learn whether they are enough.
        width = logits.shape[1] if logits.is_cuda else min(_TOP_P_CANDIDATES, logits.shape[1])
        while True:
            top = logits.topk(width, dim=-1).values
            mass = torch.exp(top.double() - total).cumsum(dim=-1)
            if width == logits.shape[1] or bool((mass[:, -1] >= self.settings.top_p).all()):
                break
            width = logits.shape[1]
        last = (mass < self.settings.top_p).sum(dim=-1, keepdim=True).clamp(max=width - 1)
        return top.gather(1, last)

    def _min_p_limit(self, logits: Tensor) -> Tensor | None:
        """Logit at which a token has `min_p` times the probability of the likeliest one, `[T, 1]`."""
        if self.settings.min_p <= 0.0:
            return None
        return logits.amax(dim=-1, keepdim=True) + math.log(self.settings.min_p)

    def _eta_limit(self, logits: Tensor) -> Tensor | None:
        """Eta sampling (Hewitt et al. 2022): min(epsilon, sqrt(epsilon) exp(-entropy)), as a logit."""
        epsilon = self.settings.eta
        if epsilon <= 0.0:
            return None
        wide = logits.double()
        total = torch.logsumexp(wide, dim=-1, keepdim=True)
        log_p = wide - total
        entropy = -torch.special.xlogy(log_p.exp(), log_p.exp()).sum(dim=-1, keepdim=True)
        log_eta = torch.clamp(0.5 * math.log(epsilon) - entropy, max=math.log(epsilon))
        return (log_eta + total).float()


def _candidates(tokens: Sequence[float], scores: Sequence[float]) -> list[Candidate]:
    """Tokens that can occur, best first, each with its share of a softmax."""
    weights = [math.exp(score - scores[0]) if score > NEG_INF else 0.0 for score in scores]
    total = sum(weights)
    return [
        Candidate(int(token), weight / total)
        for token, weight, score in zip(tokens, weights, scores, strict=True)
        if score > NEG_INF
    ]


def penalise(logits: Tensor, windows: Tensor, theta: float) -> None:
    """Contextual penalty (paper, section 3.5), in place, once per token id of a row's window.

    A positive logit is divided by `theta`, a negative one multiplied.
    """
    seen = logits.gather(1, windows)
    logits.scatter_(1, windows, torch.where(seen > 0, seen / theta, seen * theta))


def keep_at_least(logits: Tensor, num_tokens: int) -> None:
    """Mask, in place, all but the `num_tokens` largest logits of each row (ties stay)."""
    limit = logits.topk(min(num_tokens, logits.shape[1]), dim=-1).values[:, -1:]
    logits.masked_fill_(logits < limit, NEG_INF)
