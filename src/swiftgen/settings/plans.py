"""Plans: what `preset.draft` may be, the record of each, and what follows from it.

A plan has ways to draft, of which each step takes one; a way is the drafters that fill a tree, in this order.
`self` is a pass of the target with the partial cache, with heads below it if the preset has any; `heads` are
they alone; `lookup` looks back; `ngram` hangs n-grams below the first level. What builds them is in
`decoding.plans`.
"""

from __future__ import annotations

from dataclasses import dataclass

SOURCES = {"base": "base", "heads": "heads", "lookup": "looking back", "ngram": "n-grams"}
"""Where drafted tokens come from, and how that is put for people, in the order it is shown in."""
_READS = {
    "self": ("heads", "kv_budget", "sink", "refresh"),
    "heads": ("heads",),
    "ngram": ("k", "ngram"),
}
"""Settings that drafters read."""
_OLD_NAMES = {"ngram": "lookup"}


@dataclass(frozen=True)
class Plan:
    """How to draft.

    Args:
        name: As it stands in a preset.
        help: What is drafted, for people.
        ways: Names of drafters; an empty way is plain decoding.
        measured: What is drafted and verified is what pays; False drafts the preset's `tree` by the first
            way and verifies all of it, as the paper does.
    """

    name: str
    help: str
    ways: tuple[tuple[str, ...], ...]
    measured: bool = True

    @property
    def needs_heads(self) -> bool:
        """Whether nothing could be drafted without heads."""
        drafting = [way for way in self.ways if way]
        return bool(drafting) and all("heads" in way for way in drafting)

    @property
    def uses_partial_cache(self) -> bool:
        """Whether some way makes draft passes."""
        return any("self" in way for way in self.ways)

    @property
    def reads(self) -> frozenset[str]:
        """Settings that matter to this plan, and not to every other."""
        of_drafters = {key for way in self.ways for name in way for key in _READS.get(name, ())}
        return frozenset(of_drafters if self.measured else of_drafters | {"tree"})

    def ways_with(self, has_heads: bool) -> tuple[tuple[str, ...], ...]:
        """The ways that are there; those by heads alone are not where there are none."""
        return tuple(way for way in self.ways if has_heads or "heads" not in way)


_ALL = (
    Plan("auto", "whatever is fastest", (("lookup", "heads"), ("lookup", "self"), ("lookup",))),
    Plan("none", "plain decoding", ((),)),
    Plan("paper", "the paper's fixed plan", (("self", "ngram"),), measured=False),
    Plan("heads", "draft heads alone", (("heads",), ())),
    Plan("lookup", "looking back in the text", (("lookup",),)),
    Plan("self", "draft passes, then heads", (("self",), ())),
)
PLANS = {plan.name: plan for plan in _ALL}
PLAN_NAMES = f"{', '.join([*PLANS][:-1])} or {[*PLANS][-1]}"
"""For messages."""


def plan_name(name: str) -> str:
    """The present name of a plan.

    Raises:
        ValueError: there is no such plan.
    """
    name = _OLD_NAMES.get(name, name)
    if name not in PLANS:
        raise ValueError(f"allowed is {PLAN_NAMES}")
    return name
