"""Generated instruction data whose answers a program can check.

Each family draws a combination of slots from closed lists or from the corpus, asks for it in one of a few wordings,
and judges any answer. A tenth of the combinations, chosen by a hash of the content itself, is held out: it occurs in
no conversation to train on and in no text to pretrain on.

    drills.py   small sums, comparing, counting, letters: one right answer each
    stories.py  stories with required hero, place and ending, and questions about them
    verse.py    lines, questions and dialogues by the speakers of the corpus
    system.py   a system prompt with a rule of style over the closed families
"""

from pocketgpt.tasks.chats import conversations, drill_text
from pocketgpt.tasks.corpus import Speech
from pocketgpt.tasks.family import Family, Item, Messages, Slots
from pocketgpt.tasks.registry import FAMILIES, check, in_style, is_heldout, make_items

__all__ = [
    "FAMILIES",
    "Family",
    "Item",
    "Messages",
    "Slots",
    "Speech",
    "check",
    "conversations",
    "drill_text",
    "in_style",
    "is_heldout",
    "make_items",
]
