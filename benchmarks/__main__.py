"""`python -m benchmarks step|collectives|ddp|plan|simulate|cell [--ranks N] [--json FILE]`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import Row
from benchmarks.table import read_json, text_of, write_json

ROOT = Path(__file__).parents[1]
_RANKS = {"step": 2, "collectives": 2, "ddp": 2, "plan": 8, "simulate": 8, "cell": 1}
_PAIRS = {"step": 30, "collectives": 20, "ddp": 30, "plan": 3, "simulate": 10, "cell": 200}


def main(arguments: Sequence[str]) -> int:
    """Prints the table and returns the exit code.

    Args:
        arguments: What stands behind `python -m benchmarks`.
    """
    parser = _parser()
    asked = parser.parse_args(arguments)
    if asked.what == "cell" and asked.ranks is not None:
        parser.error("`cell` has no ranks: leave `--ranks` out")
    ranks = asked.ranks or _RANKS[asked.what]
    pairs = asked.pairs or _PAIRS[asked.what]
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded; one thread for each rank
    try:
        rows = _measure(asked, ranks, pairs)
    except subprocess.CalledProcessError as error:
        print(f"error: {' '.join(map(str, error.cmd))} failed", file=sys.stderr)
        return error.returncode if error.returncode > 0 else 1
    print(text_of(rows))
    if asked.json is not None:
        write_json(rows, asked.json)
    return 0


def _measure(asked: argparse.Namespace, ranks: int, pairs: int) -> list[Row]:
    if asked.what == "plan":
        from benchmarks import plan

        return plan.measure(ranks, pairs, small=asked.small)
    if asked.what == "simulate":
        from benchmarks import simulate

        return simulate.measure(ranks, pairs, small=asked.small)
    if asked.what == "cell":
        from benchmarks import cell

        return cell.measure(pairs, small=asked.small)
    more = [*(["--small"] if asked.small else []), *asked.case]
    rows = on_ranks(asked.what, ranks, pairs, more)
    if asked.what == "step" and ranks > 1 and (not asked.case or "one-rank" in asked.case):
        rows += on_ranks("step", 1, pairs, more)
    return rows


def on_ranks(what: str, ranks: int, pairs: int, more: Sequence[str] = ()) -> list[Row]:
    """The rows that some ranks measure together, each with one thread.

    Args:
        what: `step`, `collectives` or `ddp`.
        ranks: How many ranks are started.
        pairs: How many pairs of times each row is made of.
        more: What else `rank.py` is told.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        start = [sys.executable, "-m", "distcell.launch", "-n", str(ranks), "--threads", "1"]
        if ranks > 1:
            start += ["--backend", "mpi"]
        script = [str(Path(__file__).with_name("rank.py")), what, str(file), str(pairs), *more]
        subprocess.run([*start, *script], cwd=ROOT, env=_environment(), check=True)
        return read_json(file)


def _environment() -> dict[str, str]:
    return {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("what", choices=sorted(_RANKS))
    parser.add_argument("--ranks", type=_count, metavar="N", help="how many ranks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    parser.add_argument("--pairs", type=_count, metavar="N", help="pairs of times for each row")
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="NAME",
        help="of `step` and `ddp` measure this only",
    )
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the command")
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
