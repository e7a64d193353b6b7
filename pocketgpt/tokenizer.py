"""Byte-level BPE: text to token ids and back, without loss, through the `tokenizers` library.

In a vocabulary of ours ids 0, 1 and 2 are the control tokens, the next 256 are the bytes, the rest are merges in the order
they were learned. One that came with somebody else's model has its own order, control tokens and chat template.
"""

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from pocketgpt.chat_template import PLAIN_TEMPLATE, TEMPLATE, valid_text
from pocketgpt.errors import UserError
from pocketgpt.files import write_json, write_text

# A chunk ends before whitespace, or, where there is none for 1,000 characters, anywhere. The time to train grows with
# the square of the longest run without whitespace: 300,000 letters in one run already take as long as 5 MB of words.
CHUNK = re.compile(r"(?s).{1,1000}(?!\S)|.{1,1000}")


class Tokenizer:
    """A byte-level BPE vocabulary, its control tokens, and the template by which conversations are written in it.

    No text can become a control token: only code that means one inserts its id. `decode(encode(text)) == text` for
    every text; a vocabulary from elsewhere may lack a byte, which is an error, or normalise to NFC. In one of ours every
    newline is a token of its own, so text may be cut after any newline and encoded in parts.
    """

    END_OF_TEXT = "<|endoftext|>"  # separates documents; pads batches
    IM_START = "<|im_start|>"
    IM_END = "<|im_end|>"
    CONTROL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
    MIN_VOCAB_SIZE = len(CONTROL_TOKENS) + 256

    eot_id: int  # stands between documents and before a text; pads batches
    im_end_id: int  # ends a turn

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        where: str = "tokenizer",
        *,
        template: str = TEMPLATE,
        bos: str | None = None,
        eos: str = IM_END,
    ) -> None:
        """Take over `backend`. template: Jinja, which is given the names of two control tokens, bos (if any) and eos.

        Raises UserError, naming `where`, if it is not a vocabulary as described above.
        """
        if not isinstance(backend.model, models.BPE) or backend.model.byte_fallback:
            raise UserError(
                f"{where}: a {type(backend.model).__name__} vocabulary that is not byte-level (SentencePiece's are none, as those "
                "of Llama 2 and Mistral): not supported"
            )
        # The library forgets this in every copy, pickle and saved file; here each of these comes through __init__.
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.template, self.bos, self.eos = template, bos, eos
        added = backend.get_added_tokens_decoder()
        self.control = {token.content: token_id for token_id, token in added.items() if token.special}
        for token in added.values():
            if token.lstrip or token.rstrip or token.single_word:
                raise UserError(f"{where}: token {token.content!r} swallows what stands beside it: not supported")
        for name in self.CONTROL_TOKENS if template == TEMPLATE else filter(None, (eos, bos)):
            if name not in self.control:
                raise UserError(f"{where}: control token {name} is missing; name another, or train a new tokenizer")
        self.im_end_id = self.control[eos]
        first = next(name for name in (self.END_OF_TEXT, bos, eos) if name in self.control)
        self.eot_id = self.control[first]
        self.control_ids = frozenset(self.control.values())
        longest_first = sorted(self.control, key=len, reverse=True)
        self.control_pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

        vocab = backend.get_vocab()
        tokens = sorted(vocab, key=vocab.__getitem__)
        plain = [i for i in range(len(tokens)) if i not in added]
        consecutive = [vocab[token] for token in tokens] == list(range(len(tokens)))
        # Vocabularies of others lack bytes that are rare in text, SmolLM's 21 of them.
        self._missing = [byte for char, byte in BYTE_OF.items() if char not in vocab]
        latin = not any(0x20 <= byte < 0x7F for byte in self._missing)
        if not (consecutive and latin and set("".join(tokens[i] for i in plain)) <= BYTE_OF.keys()):
            raise UserError(f"{where}: not a byte-level vocabulary with consecutive ids: not supported")
        self._bytes = [
            added[i].content.encode() if i in added else bytes(BYTE_OF[char] for char in token)
            for i, token in enumerate(tokens)
        ]

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
    def from_json(cls, text: str, where: str = "tokenizer", **roles: Any) -> "Tokenizer":
        """The tokenizer whose tokenizer.json is `text`; roles: template, bos and eos where they are not ours.

        Raises UserError, naming `where`, if it is no vocabulary that this class describes.
        """
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"{where}: not a tokenizer.json ({error}); train a new tokenizer") from error
        return cls(backend, where, **roles)

    def to_json(self) -> str:
        """The content of tokenizer.json: the same text for the same vocabulary."""
        return self._backend.to_str(pretty=True)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of `to_json()`: ids cached on disk are stale if it is not the one they were made with."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def roles(self) -> dict[str, Any]:
        """What tokenizer.json does not say: the keywords of `from_json`."""
        return {"template": self.template, "bos": self.bos, "eos": self.eos}

    @property
    def adds_bos(self) -> bool:
        """Whether other programs put bos before a plain text, as tokenizer.json tells them to (Llama 3's does). Ours never do."""
        return self.bos is not None and self._backend.encode("").ids[:1] == [self.control[self.bos]]

    def __reduce__(self) -> tuple[Callable[[], "Tokenizer"], tuple[()]]:
        return partial(Tokenizer.from_json, self.to_json(), **self.roles), ()

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read a tokenizer.json, or a folder with the one and its tokenizer_config.json. Raises UserError naming the file."""
        path = Path(path)
        if not path.is_dir():
            return cls.from_json(_read(path), str(path))
        file = path / "tokenizer.json"
        if not file.exists():
            raise UserError(
                f"{path}: no tokenizer.json in it, the one form of a tokenizer that is read: load the folder with transformers' "
                "AutoTokenizer and save it again"
            )
        return cls.from_json(_read(file), str(file), **roles_in(path))

    def save(self, folder: str | Path, block_size: int) -> None:
        """Write tokenizer.json and tokenizer_config.json, from which `transformers.AutoTokenizer` loads the same.

        `block_size` is the longest sequence, in tokens, that the model takes.
        """
        config = {
            # With this name AutoTokenizer takes tokenizer.json as it is. Without, it goes by the model type beside it
            # (qwen3) and puts that family's pre-tokenizer in the place of ours.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.bos,
            "eos_token": self.eos,
            "pad_token": self.decode([self.eot_id]),
            "add_bos_token": self.adds_bos,
            "model_max_length": block_size,
            # The defaults of transformers 4 for these two break generation and the spaces before punctuation.
            "model_input_names": ["input_ids", "attention_mask"],
            "clean_up_tokenization_spaces": False,
            "chat_template": self.template,
        }
        folder = Path(folder)
        write_text(folder / "tokenizer.json", self.to_json())
        write_json(folder / "tokenizer_config.json", config)
        # An earlier one would be read in place of ours.
        (folder / "chat_template.jinja").unlink(missing_ok=True)

    @property
    def vocab_size(self) -> int:
        """The number of tokens there really are: on a small corpus fewer than training was asked for."""
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, never a control id. Raises UserError if it holds a lone surrogate, which is no text, or a byte
        that a vocabulary from elsewhere lacks."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many texts at once, on all processors (in a forked process, as `map` starts them, on one)."""
        batch = [valid_text(text) for text in texts]
        if self._missing:
            for text in batch:
                if lost := set(self._missing).intersection(text.encode()):
                    raise UserError(
                        f"the vocabulary has no token for byte 0x{min(lost):02x}, which the text holds: remove it"
                    )
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
        lengths[list(self.control_ids)] = 0
        return lengths


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); name another file or folder") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not a tokenizer.json ({error}); name another file or folder") from error


def roles_in(folder: Path) -> dict[str, Any]:
    """What a model folder says of its tokenizer beside tokenizer.json: template, bos and eos; {} if it says nothing.

    The template is in chat_template.jinja (transformers from 4.56 on), or in tokenizer_config.json. A model that has none
    was never shown a conversation: PLAIN_TEMPLATE is put in its place, which needs nothing but its eos.
    """
    file = folder / "tokenizer_config.json"
    raw = _object(file) if file.exists() else {}
    bos, eos = (_content(raw.get(key)) for key in ("bos_token", "eos_token"))
    eos = eos or _end_by_id(folder)
    if eos in (None, Tokenizer.IM_END) and not file.exists():  # nothing speaks against a folder of ours
        return {}
    if eos is None:
        raise UserError(f"{file}: no eos_token in it, so nothing says where an answer ends")
    template = raw.get("chat_template")
    if (separate := folder / "chat_template.jinja").exists():
        template = _read(separate)
    if isinstance(template, list):  # several by name, of transformers 4.38
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is not None and not isinstance(template, str):
        raise UserError(f"{file}: its chat_template is no text")
    return {"template": template or PLAIN_TEMPLATE, "bos": bos, "eos": eos}


def _end_by_id(folder: Path) -> str | None:
    """The control token whose id config.json gives as the end. The folder of GPT-2 on the hub names it nowhere else."""
    file = folder / "config.json"
    stop = _object(file).get("eos_token_id") if file.exists() else None
    stop = stop[0] if isinstance(stop, list) and stop else stop
    if stop is None:
        return None
    added = _object(folder / "tokenizer.json").get("added_tokens")
    tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    return next((_content(token) for token in tokens if token.get("id") == stop), None)


def _object(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not readable as JSON ({error})") from None
    if not isinstance(raw, dict):
        raise UserError(f"{file}: not a JSON object")
    return raw


def _content(token: Any) -> str | None:
    """The name of a control token, which tokenizer_config.json gives plain or among its flags."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary.

    Visible Latin-1 characters stand for their own byte; the other bytes take the code points from 256 on, in order.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(visible))
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


def _chunks(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for match in CHUNK.finditer(valid_text(text)):
            yield match.group()
