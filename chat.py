"""Talk to a model in the terminal.

    python chat.py                                        # checkpoints/latest
    python chat.py checkpoints/ckpt_base.pt --temperature 0
    python chat.py --prompt "What is 3 + 4?" --seed 1     # one answer on stdout, nothing else
    python chat.py checkpoints/smollm2 --quant int8       # a quarter of the bytes to read for each token
    printf 'What is 3 + 4?\nAnd 5 + 4?\n' | python chat.py   # one turn per line

docs/chat.md tells how the cache is kept across turns and what happens at the end of the context.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from kv_cache import CachedGPT
from pocketgpt import checkpoint, kernels
from pocketgpt.device import pick_device
from pocketgpt.errors import Parser, UserError, run
from pocketgpt.files import write_text
from pocketgpt.packed import FORMATS
from pocketgpt.sampling import Settings
from pocketgpt.session import Session

COMMANDS = {
    "/reset": "forget everything but the system prompt",
    "/undo": "forget the last question and its answer",
    "/regenerate": "answer the last question again",
    "/save FILE": "write the conversation as a line of JSONL, which sft.py reads",
    "/help": "this list",
    "/quit": "leave, as Ctrl-D does",
}
HISTORY_LINES = 1000
# A model can write any byte, and some of them command a terminal: there they become pictures of themselves.
PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def main() -> None:
    args = parse(sys.argv[1:])
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8")  # whatever the locale says
    settings = Settings(args.temperature, args.top_k, args.top_p, args.min_p, args.repetition_penalty)
    loaded = checkpoint.load(args.checkpoint)
    device = pick_device(args.device)
    model = CachedGPT.from_loaded(loaded, device)
    millions = model.n_parameters() / 1e6
    without_kernels = kernels.build() if device.type == "cpu" else f"this is {device.type}"
    if not without_kernels:  # rounded weights take rounded keys and values: a long context has more of these to read
        model.pack(args.quant, "float32" if args.quant == "float32" else "bfloat16")
    elif args.quant != "float32":
        raise UserError(f"--quant {args.quant} is for a CPU with its C++ kernels, and {without_kernels}: leave it out")
    elif device.type == "cpu":
        note(f"{without_kernels}: the answers come on torch's operators, which takes longer")
    session = Session(
        model, loaded.tokenizer, settings, system=args.system, max_new_tokens=args.max_new_tokens, seed=args.seed
    )
    chat = Chat(session, interactive=args.prompt is None and sys.stdin.isatty() and sys.stdout.isatty())
    if args.prompt is not None:
        if not args.prompt.strip():
            raise UserError("the prompt is empty: say something")
        chat.ask(args.prompt)
    elif chat.interactive:
        note(
            f"{args.checkpoint}: stage {loaded.stage}, {millions:.2f} M parameters in {args.quant}, "
            f"context of {session.block_size} tokens"
        )
        if loaded.stage == "base":
            note("a base model goes on writing text; it learns to answer in the next stage: make sft")
        note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves")
        chat.talk()
    else:
        chat.read(sys.stdin)


def parse(arguments: list[str]) -> argparse.Namespace:
    commands = "".join(f"\n  {name:<13}{what}" for name, what in COMMANDS.items())
    parser = Parser(
        prog="chat.py",
        description="Talk to a model. Without --prompt, lines from a terminal or a pipe are the turns of a conversation.",
        epilog=f"commands in a conversation:{commands}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "checkpoint",
        nargs="?",
        default="checkpoints/latest",
        metavar="CHECKPOINT",
        help="a ckpt_<stage>.pt or a model folder (%(default)s)",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="answer this and leave")
    parser.add_argument("--system", default="", metavar="TEXT", help="how the model is to behave; stands first")
    parser.add_argument("--temperature", type=float, default=0.7, metavar="T", help="0 is argmax (%(default)s)")
    parser.add_argument(
        "--top-p", type=float, default=0.95, metavar="P", help="keep this probability mass (%(default)s)"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="keep the K most probable tokens")
    parser.add_argument("--min-p", type=float, metavar="P", help="keep tokens this probable against the best one")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R", help="above 1: repeat less (off)")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="per answer (as many as fit)")
    parser.add_argument("--seed", type=int, metavar="N", help="same seed, same text (a new one each time)")
    parser.add_argument(
        "--quant",
        default="float32",
        choices=FORMATS,
        help="weights in fewer bytes: faster, and a little less exact (%(default)s)",
    )
    parser.add_argument("--device", default="auto", help="auto, cuda, mps or cpu (%(default)s)")
    args = parser.parse_args(arguments)
    for name, given in vars(args).items():
        if isinstance(given, list):  # what argparse makes of --seed=--
            parser.error(f"argument --{name.replace('_', '-')}: '--' is no value")
    return args


class Chat:
    """What happens to each line of input. Answers go to stdout, everything else to stderr."""

    def __init__(self, session: Session, *, interactive: bool) -> None:
        self.session = session
        self.interactive = interactive  # a person at a terminal, on both ends
        self.saved: set[Path] = set()

    def read(self, lines: Iterable[str]) -> None:
        """Take each line of a pipe or a file as a turn. The first mistake ends it."""
        empty = True
        try:
            for line in lines:
                if line := line.strip():
                    empty = False
                    self.take(line)
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise UserError(f"stdin is not UTF-8 (byte 0x{error.object[error.start]:02x}): convert it") from None
        if empty:
            raise UserError("nothing came on stdin: give one message per line, or use --prompt")

    def talk(self) -> None:
        """Take lines from the keyboard until Ctrl-D, /quit, or Ctrl-C twice."""
        history = History()
        interrupted = False
        while True:
            try:
                print()
                line = input("> ").strip()
                interrupted = False
                if line:
                    history.add(line)
                    self.take(line)
            except UserError as error:
                note(str(error))
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                if interrupted:
                    return
                interrupted = True
                note("Ctrl-C again or Ctrl-D leaves")
            except UnicodeDecodeError:
                note("that was not UTF-8: set the terminal to it")

    def take(self, line: str) -> None:
        """A command or a message. Raises EOFError to leave."""
        command, _, argument = line.partition(" ")
        if not command.startswith("/"):
            self.ask(line)
        elif command == "/reset":
            self.session.reset()
            note("the conversation is empty again")
        elif command == "/undo":
            question = self.session.undo()
            note(
                f"forgotten, with its answer: {textwrap.shorten(question.translate(PICTURES), 60, placeholder=' ...')}"
            )
        elif command == "/regenerate":
            self.answer()
            if self.session.settings.temperature == 0:
                note("with temperature 0 the answer is always the same")
        elif command == "/save":
            self.save(argument.strip())
        elif command == "/help":
            for name, what in COMMANDS.items():
                note(f"{name:<13}{what}", indent=13)
        elif command == "/quit":
            raise EOFError
        else:
            raise UserError(f"there is no command {command}; /help lists them (a message cannot begin with a slash)")

    def ask(self, text: str) -> None:
        dropped = self.session.ask(text)
        if dropped:
            turns = "the oldest turn is" if dropped == 1 else f"the {dropped} oldest turns are"
            note(f"the context of {self.session.block_size} tokens is full: {turns} out of it now")
        self.answer()

    def answer(self) -> None:
        """Show the answer while it is written, then what is worth knowing about it."""
        times = []
        with self.stoppable() as stop, contextlib.closing(self.session.answer()) as pieces:
            try:
                for piece in pieces:
                    sys.stdout.write(piece.translate(PICTURES) if sys.stdout.isatty() else piece)
                    sys.stdout.flush()
                    times.append(time.perf_counter())
                    if stop.is_set():
                        break
            finally:
                print(flush=True)
        if self.session.ending == "context":
            note(f"the context of {self.session.block_size} tokens is full: the answer ends here")
        if self.interactive:
            # The first token waited for the prompt to be read; the others show the speed of writing.
            rate = f", {(len(times) - 1) / (times[-1] - times[0]):,.0f} tok/s" if len(times) > 1 else ""
            why = {"interrupted": "stopped, ", "length": "cut at --max-new-tokens, "}.get(self.session.ending, "")
            context = f"context {self.session.context_length()}/{self.session.block_size}"
            note(f"{why}{self.session.n_new} tokens{rate}, {context}")

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[threading.Event]:
        """At a terminal, Ctrl-C sets this event and raises nothing, so that no step of an answer is left half done."""
        stop = threading.Event()
        if not self.interactive:
            yield stop
            return
        before = signal.signal(signal.SIGINT, lambda *_: stop.set())
        try:
            yield stop
        finally:
            signal.signal(signal.SIGINT, before)

    def save(self, name: str) -> None:
        if not name:
            raise UserError("/save needs the name of a file, as in /save chat.jsonl")
        if "\0" in name:
            raise UserError("the name of a file cannot hold a NUL character")
        if not self.session.messages:
            raise UserError("nothing has been said yet")
        path = Path(name).expanduser()
        if path.exists() and path.resolve() not in self.saved:
            raise UserError(f"{path} is there already: name another file")
        write_text(path, json.dumps({"messages": self.session.conversation()}, ensure_ascii=False) + "\n")
        self.saved.add(path.resolve())
        note(f"saved to {path}")


class History:
    """Line editing, and the lines of earlier chats: one JSON string a line, as GNU readline and macOS's libedit would
    each refuse the other's file."""

    def __init__(self) -> None:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.path: Path | None = home / "pocketgpt" / "history"
        try:
            import readline  # importing it is what gives input() its editing
        except ImportError:
            note("this Python has no readline: no line editing, no history")
            self.path = None
            return
        # Text that is pasted with line ends in it is one message. libedit knows no such setting and ignores it.
        readline.parse_and_bind("set enable-bracketed-paste on")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.touch(mode=0o600)
            lines = self.path.read_text(encoding="utf-8").splitlines()
            for line in lines[-HISTORY_LINES:]:
                readline.add_history(str(json.loads(line)))
            if len(lines) > 2 * HISTORY_LINES:
                self.path.write_text("".join(f"{line}\n" for line in lines[-HISTORY_LINES:]), encoding="utf-8")
        except (OSError, ValueError) as error:
            self.give_up(error)

    def add(self, line: str) -> None:
        if self.path is not None:
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            except OSError as error:
                self.give_up(error)

    def give_up(self, error: Exception) -> None:
        note(f"this chat leaves no history: {self.path} cannot be used ({error})")
        self.path = None


def note(text: str, indent: int = 0) -> None:
    """A remark on stderr: dim and wrapped at a terminal, plain elsewhere. Nothing is coloured under NO_COLOR."""
    if sys.stderr.isatty():
        columns = max(20, shutil.get_terminal_size().columns)
        text = textwrap.fill(
            text, columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
        )
        if not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
            text = f"\033[2m{text}\033[0m"
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run(main)
