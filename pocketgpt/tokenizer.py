"""Byte-level BPE: text to token ids and back, without loss, through the `tokenizers` library.

Ids 0, 1 and 2 are the control tokens, the next 256 are the bytes, the rest are merges in the order they were learned.
"""

import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from pocketgpt.chat_template import TEMPLATE
from pocketgpt.errors import UserError
from pocketgpt.files import write_json, write_text

# A chunk ends before whitespace, or, where there is none for 1,000 characters, anywhere. The time to train grows with
# the square of the longest run without whitespace: 300,000 letters in one run already take as long as 5 MB of words.
CHUNK = re.compile(r"(?s).{1,1000}(?!\S)|.{1,1000}")


class Tokenizer:
    """A byte-level BPE vocabulary with three control tokens.

    No text can become a control token: only code that means one inserts its id. `decode(encode(text)) == text` for
    every text. Every newline is a token of its own, so text may be cut after any newline and encoded in parts.
    """

    END_OF_TEXT = "<|endoftext|>"  # separates documents; pads batches
    IM_START = "<|im_start|>"
    IM_END = "<|im_end|>"
    CONTROL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
    MIN_VOCAB_SIZE = len(CONTROL_TOKENS) + 256

    eot_id, im_start_id, im_end_id = range(3)

    def __init__(self, backend: tokenizers.Tokenizer, where: str = "tokenizer") -> None:
        """Take over `backend`. Raises UserError, naming `where`, if it is not a vocabulary as described above."""
        # The library forgets this in every copy, pickle and saved file; here each of these comes through __init__.
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        for token_id, token in enumerate(self.CONTROL_TOKENS):
            if token_id not in added or added[token_id].content != token or not added[token_id].special:
                raise UserError(f"{where}: control token {token} with id {token_id} is missing; train a new tokenizer")
        self._backend = backend
        vocab = backend.get_vocab()
        tokens = sorted(vocab, key=vocab.__getitem__)
        consecutive = [vocab[token] for token in tokens] == list(range(len(tokens)))
        if not (consecutive and BYTE_OF.keys() <= vocab.keys() and set("".join(tokens)) <= BYTE_OF.keys()):
            raise UserError(f"{where}: not a byte-level vocabulary with consecutive ids; train a new tokenizer")
        self._bytes = [bytes(BYTE_OF[char] for char in token) for token in tokens]

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learn merges from `texts` until there are `vocab_size` tokens, or no pair is left that occurs twice."""
        if vocab_size < cls.MIN_VOCAB_SIZE:
            raise UserError(
                f"vocabulary size {vocab_size} is too small: 256 bytes and {len(cls.CONTROL_TOKENS)} control tokens "
                f"need {cls.MIN_VOCAB_SIZE}"
            )
        if vocab_size > 1 << 20:  # the library makes room for all of it at once, and ends the process if it cannot
            raise UserError(f"vocabulary size {vocab_size} is too large: at most {1 << 20:,}")
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                # A newline that never merges keeps the chat header "user\n" apart from whatever content follows it.
                # As no merge holds one, the ids are those of the other two alone, which llama.cpp knows as "smollm".
                pre_tokenizers.Split("\n", "isolated"),
                # One token per digit: arithmetic is a few hundred facts instead of one per pair of numbers.
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=list(cls.CONTROL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=sys.stdout.isatty(),  # elsewhere its bars are blank lines
        )
        backend.train_from_iterator(_chunks(texts), trainer)
        return cls(backend)

    @classmethod
    def from_json(cls, text: str, where: str = "tokenizer") -> "Tokenizer":
        """The tokenizer whose tokenizer.json is `text`. Raises UserError, naming `where`, if it is not one of ours."""
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"{where}: not a tokenizer.json ({error}); train a new tokenizer") from error
        return cls(backend, where)

    def to_json(self) -> str:
        """The content of tokenizer.json: the same text for the same vocabulary."""
        return self._backend.to_str(pretty=True)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of `to_json()`: ids cached on disk are stale if it is not the one they were made with."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def __reduce__(self) -> tuple[Callable[[str], "Tokenizer"], tuple[str]]:
        return Tokenizer.from_json, (self.to_json(),)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read a tokenizer.json, or the one in a folder. Raises UserError naming the file."""
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror}); name another file or folder") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{file}: not a tokenizer.json ({error}); name another file or folder") from error
        return cls.from_json(text, str(file))

    def save(self, folder: str | Path, block_size: int) -> None:
        """Write tokenizer.json and tokenizer_config.json, from which `transformers.AutoTokenizer` loads the same.

        `block_size` is the longest sequence, in tokens, that the model takes.
        """
        config = {
            # With this name AutoTokenizer takes tokenizer.json as it is. Without, it goes by the model type beside it
            # (qwen3) and puts that family's pre-tokenizer in the place of ours.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": self.IM_END,
            "pad_token": self.END_OF_TEXT,
            "add_bos_token": False,
            "model_max_length": block_size,
            # The defaults of transformers 4 for these two break generation and the spaces before punctuation.
            "model_input_names": ["input_ids", "attention_mask"],
            "clean_up_tokenization_spaces": False,
            "chat_template": TEMPLATE,
        }
        folder = Path(folder)
        write_text(folder / "tokenizer.json", self.to_json())
        write_json(folder / "tokenizer_config.json", config)

    @property
    def vocab_size(self) -> int:
        """The number of tokens there really are: on a small corpus fewer than training was asked for."""
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, never a control id. Raises UserError if it holds a lone surrogate, which is no text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many texts at once, on all processors (in a forked process, as `map` starts them, on one)."""
        batch = [_valid(text) for text in texts]
        return [encoding.ids for encoding in self._backend.encode_batch_fast(batch, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, control tokens by their name; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What `token_id` adds to the output: often a whole word, sometimes a part of one character."""
        if not 0 <= token_id < self.vocab_size:
            raise UserError(f"token id {token_id} is outside the tokenizer's {self.vocab_size}: is it another model's?")
        return self._bytes[token_id]

    def byte_lengths(self) -> np.ndarray:
        """Bytes of text per token, (vocab_size,) int32, for bits per byte. 0 for control tokens: they are no text."""
        lengths = np.array([len(raw) for raw in self._bytes], dtype=np.int32)
        lengths[: len(self.CONTROL_TOKENS)] = 0
        return lengths


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary.

    Visible Latin-1 characters stand for their own byte; the other bytes take the code points from 256 on, in order.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(visible))
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


def _valid(text: str) -> str:
    """Give `text` back if it has a UTF-8 form. JSON can smuggle in halves of surrogate pairs, which have none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        before = text[max(0, error.start - 20) : error.start]
        raise UserError(
            f"text holds half a surrogate pair, {text[error.start]!r} after {before!r}: remove it"
        ) from None
    return text


def _chunks(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for match in CHUNK.finditer(_valid(text)):
            yield match.group()
