#!/usr/bin/env python3
"""Every command and code block of the README and of the pages on a GPU, those too that need one.

    python tests/gpu/check_docs.py [--rehearse] [--only README.md,tuning.md]

Each page is followed from its first block on, in a folder of its own with a small encoder.  ``--rehearse`` leaves out
what needs a GPU, as the tests do; ``--only`` follows the pages of these names.  Exits with 1 where a command fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from doc_commands import CHOSEN, follow, prepare  # noqa: E402


def main() -> int:
    """Follow every page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="leave out what needs a GPU")
    parser.add_argument("--only", metavar="PAGE,...", help="names of pages")
    arguments = parser.parse_args()
    gpu, only = not arguments.rehearse, arguments.only.split(",") if arguments.only else None
    if unknown := set(only or ()) - {page.name for page in CHOSEN}:
        parser.error(f"no page has the name {', '.join(sorted(unknown))}")
    failed = 0
    for page in CHOSEN:
        if only is not None and page.name not in only:
            continue
        start = time.perf_counter()
        with TemporaryDirectory() as place:
            os.chdir(place)
            os.environ["ONNXFUSE_DATABASE"] = str(Path(place) / "measurements.sqlite")
            prepare(Path(place))
            try:
                follow(page, gpu)
                told = "ok"
            except Exception as error:  # whatever it is, the other pages are followed
                told, failed = str(error) or type(error).__name__, failed + 1
            print(f"{page.relative_to(ROOT)}: {told} ({time.perf_counter() - start:.0f} s)", flush=True)
    os.chdir(ROOT)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
