"""One way to say that something the user gave us is wrong."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn


class UserError(Exception):
    """Bad input. The message is one line: what is wrong, where, and what to do about it."""


class Parser(argparse.ArgumentParser):
    """Whose complaints are UserErrors too. Name the script in `prog`."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; python {self.prog} --help lists the options")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it says so: the devices of torch have no exception in common for it."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text


def run(main: Callable[[], None]) -> None:
    """Run a script's `main`: what the user can do something about becomes one line on stderr and exit code 1, Ctrl-C exit
    code 130. Everything else is a fault of ours and keeps its traceback."""
    try:
        main()
    except UserError as error:
        fail(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output left, as in `python kv_cache.py | head`
        sys.stderr.close()
        sys.exit(141)
    except OSError as error:
        fail(f"{error.filename or 'input or output'}: {error.strerror or error}")
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        fail("out of memory: take a smaller model or context, or lower train.micro_batch_size")


def fail(message: str) -> NoReturn:
    rank = os.environ.get("RANK", "0")  # under torchrun every process says what it has to say, and which it is
    print(f"error: {'' if rank == '0' else f'process {rank}: '}{' '.join(message.split())}", file=sys.stderr)
    sys.exit(1)
