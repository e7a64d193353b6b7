"""What all tests share."""

import os

import pytest
import torch

from pocketgpt.tokenizer import Tokenizer

# Results do not depend on the machine's cores, and tests that run side by side do not crowd it; nor do the programs they start.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

TEXT = """\
The lighthouse keeper climbed the narrow stairs every evening and lit the lamp before the boats came home.
Her brother kept the boats. He painted one of them red, one of them green, and left the third as grey as the sea.
"When will the storm come?" asked the keeper. "When the gulls stop talking," said her brother, "and not before."
So they listened to the gulls. The gulls talked about the sea, the sand and the bread that the baker threw away.
The baker was a friend of the keeper. She baked forty small loaves in the morning and twenty large ones at noon.
One evening the gulls were silent. The keeper lit the lamp early, and the brother pulled the boats onto the sand.
The storm came in the night; it took the green boat and the baker's chimney, but the lamp burned until the morning.
"You listened well," said the baker, and she gave bread to the keeper, to the brother and to the gulls.
Question: what is 3 plus 4? Answer: 3 plus 4 is 7. Question: what is 12 plus 30? Answer: 12 plus 30 is 42.
Question: where is the lamp? Answer: the lamp is in the lighthouse. Question: who baked the bread? The baker did.

user: hello, assistant.
assistant: hello, user. The system is listening.
"""


@pytest.fixture(scope="session")
def corpus() -> str:
    """A page of English, ASCII only."""
    return TEXT


@pytest.fixture(scope="session")
def tok(corpus: str) -> Tokenizer:
    """A tokenizer of 400 tokens."""
    return Tokenizer.train([corpus], 400)
