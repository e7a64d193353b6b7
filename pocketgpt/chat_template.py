"""ChatML: how a conversation becomes one sequence of tokens, and which of them the model learns to say.

    <|im_start|>user
    Name a colour.<|im_end|>
    <|im_start|>assistant
    Blue.<|im_end|>

A segment (header, content) is tokenized apart and joined to the others as ids, around control ids that this module
alone inserts. So what a content says cannot forge a turn, the prompt that chat feeds is the exact prefix of what
training saw, and the border of the answer is known from lengths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pocketgpt.errors import UserError

if TYPE_CHECKING:
    from pocketgpt.tokenizer import Tokenizer

Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": str}

# The same in Jinja, for programs that load our folders. It has no newline outside its strings: how a template engine
# trims those differs.
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def render(tok: Tokenizer, messages: list[Message], learn_from: int = 0) -> tuple[list[int], list[bool]]:
    """The ids of a conversation, and for each id whether it is supervised.

    Supervised are the content of every assistant turn and the <|im_end|> after it, on which chat stops; none before
    message number `learn_from`. `messages` is what `check_messages` lets through.
    """
    ids: list[int] = []
    supervised: list[bool] = []
    newline = tok.encode("\n")
    for number, message in enumerate(messages):
        learned = message["role"] == "assistant" and number >= learn_from
        header = _header(tok, message["role"])
        said = [*tok.encode(message["content"]), tok.im_end_id]
        ids += header + said + newline
        supervised += [False] * len(header) + [learned] * len(said) + [False] * len(newline)
    return ids, supervised


def render_prompt(tok: Tokenizer, messages: list[Message]) -> list[int]:
    """The ids after which the model writes its answer: `render` of any continuation by the assistant begins so."""
    return render(tok, messages)[0] + _header(tok, "assistant")


def _header(tok: Tokenizer, role: str) -> list[int]:
    return [tok.im_start_id, *tok.encode(f"{role}\n")]


def check_messages(messages: Any, where: str) -> None:
    """Raise UserError, naming `where`, unless `messages` is a conversation.

    That is: an optional system message, then user and assistant in turn, the user first. Contents may be empty (a
    model can answer nothing, and chat must go on); keys other than role and content are ignored.
    """
    if not isinstance(messages, list):
        raise UserError(f"{where}: messages must be a list, not {type(messages).__name__}")
    turns = 0
    for i, message in enumerate(messages):
        at = f"{where}: message {i + 1}"
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise UserError(f'{at} must be an object with "role" and "content"')
        role, content = message["role"], message["content"]
        if not isinstance(content, str):
            raise UserError(f"{at}: content must be a string, not {type(content).__name__}")
        if role == "system" and i == 0:
            continue
        due = ("user", "assistant")[turns % 2]
        if role != due:
            raise UserError(f"{at}: role must be {due!r} here, not {role!r} (system first, then user and assistant)")
        turns += 1
    if turns == 0:
        raise UserError(f"{where}: a conversation needs at least one user message")
