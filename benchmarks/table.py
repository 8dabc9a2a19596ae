"""The rows as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import Row

_HEAD = (
    "case",
    "batch",
    "ours",
    "peer",
    "ours ms",
    "peer ms",
    "ratio",
    "quartiles",
    "limit",
    "pairs",
    "",
)


def text_of(rows: Sequence[Row]) -> str:
    """The table."""
    cells = [_HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEAD))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    if rows:
        loads = [row.load for row in rows]
        lines.append(f"load of the machine {min(loads):.1f} to {max(loads):.1f}")
    return "\n".join(lines)


def write_json(rows: Sequence[Row], path: Path) -> None:
    """Writes the rows as a JSON list."""
    text = json.dumps([row.to_json() for row in rows], indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> list[Row]:
    """The rows that `write_json` wrote."""
    return [Row(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def _cells(row: Row) -> tuple[str, ...]:
    missed = row.limit is not None and row.ratio > row.limit
    return (
        row.case,
        "" if row.batch is None else str(row.batch),
        row.ours,
        row.peer,
        _number(row.ours_ms),
        _number(row.peer_ms),
        f"{row.ratio:.3f}",
        f"{row.low:.3f}-{row.high:.3f}",
        "" if row.limit is None else f"{row.limit:g}",
        f"{row.pairs}/{row.taken or row.pairs}",
        "MISSED" if missed else "",
    )


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"
