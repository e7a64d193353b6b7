"""A page of what the stages left in a folder: report.html, to open in any browser, without a network.

    python report.py checkpoints                         # one run, also while it is still training
    python report.py A B --to compare.html               # several runs in the same charts, and what differs in their settings

The stages, evaluate.py and kv_cache.py write the page of their own folder when they end.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pocketgpt import report
from pocketgpt.errors import run


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a folder that was out= of the stages")
    parser.add_argument(
        "--to", type=Path, help="the page to write; default: report.html in RUN, compare.html here for several"
    )
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    default = options.runs[0] / "report.html" if len(options.runs) == 1 else Path("compare.html")
    print(f"report {report.write(options.runs, options.to or default)}")


if __name__ == "__main__":
    run(main)
