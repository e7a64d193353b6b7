"""How a conversation becomes one sequence of tokens, and which of them the model learns to say. Ours is ChatML:

    <|im_start|>user
    Name a colour.<|im_end|>
    <|im_start|>assistant
    Blue.<|im_end|>

The template is a Jinja program that belongs to the tokenizer, so that a model from elsewhere is shown what it knows. What
it writes is cut at its control tokens and before each answer, and the segments between are tokenized apart and joined
as ids. So what a content says cannot forge a turn, the prompt that chat feeds is the exact prefix of what training saw,
and the border of the answer is known from lengths.
"""

from __future__ import annotations

import json
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pocketgpt.errors import UserError

if TYPE_CHECKING:
    from pocketgpt.tokenizer import Tokenizer

Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": str}

# Ours has no newline outside its strings: how a template engine trims those differs.
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# For a model that comes without one. Its only control token is the end of a text, which no content can write.
PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] + '\\n' + message['content'] + eos_token + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}"
)

# Stands around each content, inside of its whitespace, which templates strip, and inside of each name of a control token
# in it. Half a surrogate pair is no text, so no content holds one.
MARK = "\udfff"


def render(tok: Tokenizer, messages: list[Message], learn_from: int = 0) -> tuple[list[int], list[bool]]:
    """The ids of a conversation, and for each id whether it is supervised.

    Supervised is what the template writes behind the prompt of every assistant turn, up to and with the control token after
    it, on which chat stops; none before message number `learn_from`. `messages` is what `check_messages` lets through.

    Raises:
        UserError: if the template refuses the conversation, or leaves unclear where an answer begins or ends.
    """
    before, *answers = _segments(tok, messages)
    numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if len(answers) < len(numbers):
        raise UserError("the model's chat template changes a prompt once it is answered: what to learn is unclear")
    ids, supervised = [*before], [False] * len(before)
    for number, part in zip(numbers, answers, strict=True):
        stop = next((at + 1 for at, token in enumerate(part) if token in tok.control_ids), 0)
        if not stop:
            raise UserError(
                "the model's chat template writes no control token after an answer, so nothing would end it"
            )
        ids += part
        supervised += [number >= learn_from] * stop + [False] * (len(part) - stop)
    return ids, supervised


def render_prompt(tok: Tokenizer, messages: list[Message]) -> list[int]:
    """The ids after which the model writes its answer: `render` of any continuation by the assistant begins so."""
    return context_ids(tok, messages, answer_next=True)


def context_ids(tok: Tokenizer, messages: list[Message], answer_next: bool = False) -> list[int]:
    """The ids of `render`, also where the template leaves unclear which of them an answer is."""
    return [token for part in _segments(tok, messages, answer_next) for token in part]


def _segments(tok: Tokenizer, messages: list[Message], answer_next: bool = False) -> list[list[int]]:
    """The ids up to the first answer, and from each answer on to the next; answers whose prompts the template has changed
    begin none."""
    text = _written(tok, messages, answer_next)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    prompts = [_written(tok, messages[:i], answer_next=True) for i in answers]
    borders = [len(prompt) for prompt in prompts if text.startswith(prompt)]
    return [_encode(tok, text[start:end]) for start, end in zip([0, *borders], [*borders, None], strict=True)]


def _written(tok: Tokenizer, messages: list[Message], answer_next: bool) -> str:
    marked = [message | {"content": _marked(tok, message["content"])} for message in messages]
    names = {"bos_token": tok.bos or "", "eos_token": tok.eos}
    try:
        return compiled(tok.template).render(messages=marked, add_generation_prompt=answer_next, **names)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise UserError(f"the model's chat template refuses this conversation: {error}") from None


def _marked(tok: Tokenizer, content: str) -> str:
    core = valid_text(content).strip()
    if not core:
        return content
    before, _, after = content.partition(core)
    return f"{before}{MARK}{tok.control_pattern.sub(lambda name: name[0][0] + MARK + name[0][1:], core)}{MARK}{after}"


def _encode(tok: Tokenizer, text: str) -> list[int]:
    """Control tokens as their ids, and what is between them as text, without the marks."""
    ids: list[int] = []
    for part in tok.control_pattern.split(text):
        ids += [tok.control[part]] if part in tok.control else tok.encode(part.replace(MARK, ""))
    return ids


@lru_cache(maxsize=8)
def compiled(template: str) -> jinja2.Template:
    """Set up as transformers does. A template from elsewhere runs in Jinja's sandbox, which reaches nothing outside of it.

    Raises:
        UserError: if it is no template.
    """

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    sandbox.globals["raise_exception"] = raise_exception
    try:
        return sandbox.from_string(template)
    except jinja2.TemplateError as error:
        raise UserError(f"the model's chat template cannot be read: {error}") from None


def valid_text(text: str) -> str:
    """Give `text` back if it has a UTF-8 form. JSON can smuggle in halves of surrogate pairs, which have none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        before = text[max(0, error.start - 20) : error.start]
        raise UserError(
            f"text holds half a surrogate pair, {text[error.start]!r} after {before!r}: remove it"
        ) from None
    return text


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
