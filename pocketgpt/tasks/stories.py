"""Four-sentence stories from closed lists, and questions about them."""

import random
import re
from collections.abc import Iterable

from pocketgpt.tasks.corpus import Corpus, listed
from pocketgpt.tasks.family import Family, Item, Messages, Slots, turn

WOMEN = listed("Rosalind Viola Portia Juliet Miranda Beatrice Hermia Helena Olivia Celia Titania Cordelia")
MEN = listed("Oberon Puck Romeo Hamlet Orlando Benedick Prospero Lysander Sebastian Horatio Mercutio Antonio")
CAST = {
    "hero": WOMEN + MEN,
    "place": listed(
        "forest garden castle tower market chapel cave meadow orchard village mill palace stable valley kitchen temple "
        "tavern field"
    ),
    "thing": listed("ring crown lantern letter sword book key drum rose cup mirror bell"),
    "friend": listed("fox goat mouse raven hare frog duck wolf"),
    "ending": listed("feast song dance wedding storm dream promise farewell"),
}

ARRIVALS = (
    "One morning {hero} went to the {place}.",
    "Once upon a time {hero} lived in the {place}.",
    "{hero} walked alone to the {place}.",
    "It was winter when {hero} came to the {place}.",
)
FINDS = (
    "There {she} found a {thing} in the dust.",
    "Under a stone {she} found a {thing}.",
    "By and by {she} found a {thing}, old and bright.",
    "{She} looked about and found a {thing}.",
)
MEETINGS = (
    "A {friend} came by and told {her} a secret.",
    "A {friend} saw it and laughed with {her}.",
    "Then a hungry {friend} came, and {she} shared some bread.",
    "A little {friend} sat down beside {her}.",
)
ENDINGS = {
    "feast": ("That night there was a great feast for all.", "And {hero} called everyone to a feast."),
    "song": ("They sang a song until the stars came out.", "And {hero} went home with a new song."),
    "dance": ("At last they joined hands in a merry dance.", "And {hero} began to dance for joy."),
    "wedding": ("In spring there was a wedding, and {hero} wept for joy.", "And the year closed with a wedding."),
    "storm": ("Then a storm broke, and {hero} ran home in the rain.", "But a storm came and washed it all away."),
    "dream": ("Then {hero} woke, for it was only a dream.", "And {hero} fell asleep and had a sweet dream."),
    "promise": ("{hero} made a promise to come back in spring.", "And so they parted with a promise."),
    "farewell": ("With tears {hero} said farewell and sailed away.", "It was a sad farewell, but {hero} smiled."),
}
REQUESTS = (
    "Tell a story about {hero} in the {place} that ends with a {ending}.",
    "Tell me of {hero} and the {place}. End it with a {ending}.",
    "I want a story with {hero}, the {place}, and at the end a {ending}.",
)
# question -> the slot asked for, the ways to ask, the answer
QUESTIONS = {
    "where": ("place", ("Where was {hero}?", "Where did this happen?"), "In the {place}."),
    "who": ("hero", ("Who found the {thing}?", "Who is the story about?"), "{hero}."),
    "what": ("thing", ("What did {hero} find?", "What was found?"), "A {thing}."),
    "animal": ("friend", ("Which animal came?", "What animal did {hero} meet?"), "A {friend}."),
    "end": ("ending", ("How did it end?", "What came at the end?"), "With a {ending}."),
}


def mentioned(words: Iterable[str], kind: str) -> set[str]:
    """Which entries of the closed list `CAST[kind]` are among the words."""
    lowered = {word.lower() for word in words}
    return {name for name in CAST[kind] if name.lower() in lowered}


def words_of(text: str) -> list[str]:
    """The words of a text without punctuation."""
    return re.findall(r"[A-Za-z']+", text)


def draw_story(rng: random.Random) -> Slots:
    """One entry of each closed list."""
    return {kind: rng.choice(names) for kind, names in CAST.items()}


def tell(rng: random.Random, slots: Slots) -> str:
    """A story with this hero, place, thing, friend and ending, in one of 512 phrasings."""
    she, her = ("she", "her") if slots["hero"] in WOMEN else ("he", "him")
    sentences = [rng.choice(wordings) for wordings in (ARRIVALS, FINDS, MEETINGS, ENDINGS[slots["ending"]])]
    return " ".join(sentences).format(**slots, she=she, She=she.capitalize(), her=her)


def request(rng: random.Random, slots: Slots) -> str:
    """The user's wish for a story with this hero, place and ending."""
    return rng.choice(REQUESTS).format(**slots)


def describe(rng: random.Random, slots: Slots) -> str:
    """A story as plain text for pretraining, with its facts named after it, or before it as a plan."""
    facts = "Hero: {hero}. Place: the {place}. Found: a {thing}. Friend: a {friend}. End: a {ending}.".format(**slots)
    parts = [tell(rng, slots), facts]
    rng.shuffle(parts)
    return "\n".join(parts)


class Story(Family):
    """A story with the required hero, place and ending; what is found and who comes by are free."""

    name = "story"
    content = ("hero", "place", "ending")
    passes = (
        "one paragraph of 3 to 6 whole sentences with the hero and the place, no other from their lists, whose last "
        "sentence alone names the ending"
    )

    def draw(self, rng: random.Random, corpus: Corpus) -> Slots:
        story = draw_story(rng)
        return {kind: story[kind] for kind in self.content}

    def pose(self, rng: random.Random, slots: Slots, corpus: Corpus) -> Item:
        return self.item(slots, request(rng, slots), tell(rng, draw_story(rng) | slots))

    def check(self, slots: Slots, text: str) -> bool:
        text = text.strip()
        sentences = re.split(r"(?<=[.!?]) +", text)
        words = [words_of(sentence) for sentence in sentences]
        spoken = [word for sentence in words for word in sentence]
        return (
            3 <= len(sentences) == len(set(sentences)) <= 6
            and all(4 <= len(sentence) <= 20 and sentence[0][0].isupper() for sentence in words)
            and "\n" not in text
            and text.endswith((".", "!"))
            and all(mentioned(spoken, kind) == {slots[kind]} for kind in self.content)
            and [slots["ending"] in sentence for sentence in words] == [False] * (len(words) - 1) + [True]
        )


class Reading(Family):
    """A question about a story that the user has told in the same turn, or the assistant in its last turn."""

    name = "reading"
    group = "story"
    content = ("hero", "place", "ending")
    passes = "up to seven words that end with the name or thing asked for, with no other from its list"

    def draw(self, rng: random.Random, corpus: Corpus) -> Slots:
        told = {"told_by": rng.choice(("user", "assistant"))}
        return draw_story(rng) | {"question": rng.choice(tuple(QUESTIONS))} | told

    def pose(self, rng: random.Random, slots: Slots, corpus: Corpus) -> Item:
        _, wordings, answer = QUESTIONS[slots["question"]]
        question, answer, story = rng.choice(wordings).format(**slots), answer.format(**slots), tell(rng, slots)
        if slots["told_by"] == "user":
            return self.item(slots, f"{story}\n{question}", answer)
        before: Messages = [turn("user", request(rng, slots)), turn("assistant", story)]
        return self.item(slots, question, answer, before)

    def check(self, slots: Slots, text: str) -> bool:
        kind, _, _ = QUESTIONS[slots["question"]]
        wanted = slots[kind].lower()
        words = text.strip().removesuffix(".").lower().split()
        return (
            0 < len(words) <= 7
            and words[-1] == wanted
            and words.count(wanted) == 1
            and mentioned(words, kind) == {slots[kind]}
        )
