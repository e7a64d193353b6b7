"""One way to say that something the user gave us is wrong."""

import sys
from collections.abc import Callable


class UserError(Exception):
    """Bad input. The message is one line: what is wrong, where, and what to do about it."""


def run(main: Callable[[], None]) -> None:
    """Run a script's `main`: a UserError becomes one line on stderr and exit code 1, Ctrl-C exit code 130."""
    try:
        main()
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output left, as in `python kv_cache.py | head`
        sys.stderr.close()
        sys.exit(141)
