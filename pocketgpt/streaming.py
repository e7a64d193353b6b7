"""Show an answer while it is being written: whole characters only, and nothing of a stop text."""

import codecs
from collections.abc import Sequence

from pocketgpt.errors import UserError
from pocketgpt.tokenizer import Tokenizer


class TextStream:
    """Turn token ids, pushed one by one, into text that never has to be taken back.

    A token may end inside a UTF-8 character, and a stop text may begin in one token and end in another; whatever is
    not certain yet is held until it is. All that `push` and `flush` return is, joined, `tok.decode` of the ids,
    up to the stop text that is complete first (of two that end together, the longer).
    """

    def __init__(self, tok: Tokenizer, stop: Sequence[str] = ()) -> None:
        """`stop`: texts that end the answer and are not shown. Raises UserError if one is empty."""
        if "" in stop:
            raise UserError("a stop text is empty: every answer would end before it begins; name some characters")
        self._tok = tok
        self._stop = list(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""  # characters that may be the beginning of a stop text
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that may be shown now. After the stop text always ""."""
        return self._advance(self._decoder.decode(self._tok.token_bytes(token_id)))

    def flush(self) -> str:
        """The answer has ended: return what was held. An incomplete character is shown as U+FFFD."""
        shown = self._advance(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return shown

    def _advance(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[1]]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` with which `stop`, not complete yet, may have begun."""
    return next(n for n in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:n]))
