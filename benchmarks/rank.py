"""What each rank runs, started by `distcell.launch`: `rank.py WHAT FILE PAIRS [--small]`."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import collectives, ddp, step
from benchmarks.model import SMALL, Size
from benchmarks.table import write_json
from distcell.runtime.world import current_world


def main(arguments: list[str]) -> None:
    what, file, pairs, *more = arguments
    small = "--small" in more
    only = [name for name in more if name != "--small"]
    if what == "step":
        rows = step.measure(SMALL if small else Size(), int(pairs), only)
    elif what == "ddp":
        rows = ddp.measure(SMALL if small else Size(), int(pairs), only, small=small)
    else:
        rows = collectives.measure(int(pairs), small=small)
    if current_world().rank == 0:
        write_json(rows, Path(file))


if __name__ == "__main__":
    main(sys.argv[1:])
