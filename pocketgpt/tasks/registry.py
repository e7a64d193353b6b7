"""All families by name, and sets of distinct items to evaluate on or to sample preferences for."""

import random
from collections.abc import Sequence

from pocketgpt.errors import UserError
from pocketgpt.tasks.corpus import Corpus, Speech
from pocketgpt.tasks.drills import DRILLS
from pocketgpt.tasks.family import Family, Item, Slots
from pocketgpt.tasks.stories import Reading, Story
from pocketgpt.tasks.system import System
from pocketgpt.tasks.verse import Dialogue, Line, Question

READING = Reading()
SYSTEM = System([*DRILLS, READING], lettered=("reverse", "reading"))
FAMILIES: dict[str, Family] = {
    family.name: family for family in (*DRILLS, Story(), READING, Line(), Question(), Dialogue(), SYSTEM)
}


def is_heldout(family: str, slots: Slots) -> bool:
    """Whether this combination belongs to the held-out tenth (the same on every machine and in every run)."""
    return FAMILIES[family].heldout(slots)


def check(item: Item, text: str) -> bool:
    """Whether `text` is a right answer to the item."""
    return FAMILIES[item.family].check(item.slots, text)


def in_style(item: Item, text: str) -> bool:
    """Whether the answer keeps the style rule that DPO teaches: a story opens with "Once upon a time". Fine-tuning shows
    that opening and three others equally often; the other families have no rule."""
    return item.family != "story" or text.startswith("Once upon a time")


def make_items(
    n_per_family: int,
    *,
    heldout: bool,
    seed: int,
    speeches: Sequence[Speech] = (),
    families: Sequence[str] | None = None,
) -> list[Item]:
    """Items with distinct slots, family by family, all from one side of the split.

    Without `families`, every family is used that the speeches allow. UserError: an unknown family, a
    family the speeches hold nothing for, or one with fewer combinations than asked for.
    """
    corpus = Corpus(speeches)
    if families is None:
        families = [name for name, family in FAMILIES.items() if family.available(corpus)]
    items: list[Item] = []
    for name in families:
        if name not in FAMILIES:
            raise UserError(f"no task family {name!r}; choose from {', '.join(FAMILIES)}")
        if not FAMILIES[name].available(corpus):
            raise UserError(f"the task family {name!r} finds nothing to quote in the speeches given; leave it out")
        items += _distinct(FAMILIES[name], n_per_family, corpus, heldout, seed)
    return items


def _distinct(family: Family, n: int, corpus: Corpus, heldout: bool, seed: int) -> list[Item]:
    # A stream of its own: what one family holds does not depend on which others are asked for.
    rng = random.Random(f"items {family.name} {heldout} {seed}")
    found: dict[tuple[tuple[str, str], ...], Item] = {}
    for _ in range(100 * n + 1000):  # far more than needed, unless fewer than n exist
        if len(found) == n:
            return list(found.values())
        slots = family.draw_from(rng, corpus, heldout=heldout)
        key = tuple(sorted(slots.items()))
        if key not in found:
            found[key] = family.pose(rng, slots, corpus)
    side = "held-out" if heldout else "training"
    raise UserError(f"the task family {family.name!r} has {len(found)} {side} combinations; ask for no more than that")
