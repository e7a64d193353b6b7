"""A system prompt with a rule of style over a question of a closed family: right answers that keep the rule pass."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from pocketgpt.tasks.corpus import Corpus
from pocketgpt.tasks.family import Family, Item, Slots, turn

PERSONAS = ("", "You are a player on the stage. ", "You are a helpful assistant. ")


@dataclass(frozen=True)
class Rule:
    """A style that can be put on an answer and taken off again."""

    prompt: str
    prefix: str = ""
    suffix: str = ""
    capitals: bool = False

    def apply(self, answer: str) -> str:
        """The answer in this style."""
        if self.capitals:
            return answer.upper()
        return self.prefix + (answer.removesuffix(".") if self.suffix else answer) + self.suffix

    def undo(self, text: str) -> str | None:
        """The answer without the style, None if the text breaks the rule."""
        text = text.strip()
        if self.capitals:
            return text.lower() if text.isupper() else None
        if text.startswith(self.prefix) and text.endswith(self.suffix):
            return text.removeprefix(self.prefix).removesuffix(self.suffix)
        return None


RULES = {
    "hark": Rule("Begin every answer with: Hark!", prefix="Hark! "),
    "troth": Rule("Begin every answer with: By my troth!", prefix="By my troth! "),
    "indeed": Rule("Begin every answer with: Indeed!", prefix="Indeed! "),
    "lord": Rule("End every answer with: my lord.", suffix=", my lord."),
    "friend": Rule("End every answer with: gentle friend.", suffix=", gentle friend."),
    "sir": Rule("End every answer with: good sir.", suffix=", good sir."),
    "quotes": Rule("Put every answer in quotes.", prefix='"', suffix='"'),
    "capitals": Rule("Answer in capital letters.", capitals=True),
}


class System(Family):
    """A question of one of the inner families under a rule; the inner question decides the split."""

    name = "system"
    content = ()
    passes = "keeps the rule of the system prompt, and passes the inner family's check once the style is taken off"

    def __init__(self, inner: Sequence[Family], lettered: Sequence[str]) -> None:
        """`lettered` names the inner families whose answers have letters, the only ones capitals can show in."""
        self.inner = {family.name: family for family in inner}
        self.lettered = tuple(lettered)

    def _inner(self, slots: Slots) -> tuple[Family, Slots]:
        rest = {name: value for name, value in slots.items() if name not in ("rule", "inner")}
        return self.inner[slots["inner"]], rest

    def heldout(self, slots: Slots) -> bool:
        family, rest = self._inner(slots)
        return family.heldout(rest)

    def draw_from(self, rng: random.Random, corpus: Corpus, *, heldout: bool, rule: str | None = None) -> Slots:
        """A random inner question from one side of the split, under the given rule or a random one."""
        rule = rule or rng.choice(tuple(RULES))
        inner = rng.choice(self.lettered if RULES[rule].capitals else tuple(self.inner))
        slots = self.inner[inner].draw_from(rng, corpus, heldout=heldout)
        if "told_by" in slots:  # a story the assistant had told before would have to keep the rule too
            slots["told_by"] = "user"
        return {"rule": rule, "inner": inner} | slots

    def pose(self, rng: random.Random, slots: Slots, corpus: Corpus) -> Item:
        family, rest = self._inner(slots)
        rule = RULES[slots["rule"]]
        item = family.pose(rng, rest, corpus)
        system = turn("system", rng.choice(PERSONAS) + rule.prompt)
        return Item(self.name, slots, [system, *item.messages], rule.apply(item.answer))

    def check(self, slots: Slots, text: str) -> bool:
        family, rest = self._inner(slots)
        answer = RULES[slots["rule"]].undo(text)
        return answer is not None and family.check(rest, answer)
