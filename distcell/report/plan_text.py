"""The summary of a plan as tables."""

from __future__ import annotations

import re
from collections.abc import Sequence

from distcell.graph import GRADIENTS
from distcell.partition.emit import Reshard
from distcell.report.figures import Spread, human
from distcell.report.fold import fold
from distcell.report.summary import Summary
from distcell.report.table import Block, Table
from distcell.sharding.plan import Note

_MEMORY = {
    "parameters": "parameters",
    "buffers": "buffers",
    "inputs": "inputs",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "saved": "saved for backward",
    "activations": "activations at their peak",
    "peak": "all together at the peak",
}


_LEAVES = {**dict.fromkeys(GRADIENTS, "its gradient"), "output": "what the network returns"}


def blocks_of(summary: Summary) -> list[Block]:
    """The tables that `python -m distcell plan` prints."""
    return [
        f"mesh {summary.mesh}     {summary.ranks} ranks     strategy {summary.strategy}",
        _parameters(summary),
        _collectives(summary),
        _memory(summary),
        _flops(summary),
        _reshards(summary.reshards),
        _notes("ops without a rule (they run replicated)", summary.notes, ("no rule",)),
        _notes("uneven dims", summary.notes, ("uneven",)),
        *_others(summary.notes),
    ]


def _parameters(summary: Summary) -> Table:
    lines = [(line.path, (line.type, line.bytes)) for line in summary.parameters]
    rows = []
    for path, count, (kind, size) in fold(lines):
        rows.append((path, _times(count), kind, *_sizes(size)))
    return Table("parameters", ("name", ">", "type", ">bytes per rank", ">one device"), tuple(rows))


def _collectives(summary: Summary) -> Table:
    rows = [
        (g.phase, g.kind, ",".join(g.axes), str(g.count), _bytes(g.bytes)) for g in summary.groups
    ]
    rows += [
        ("in all", "", axes, str(_count(summary, axes)), _bytes(size))
        for axes, size in summary.bytes_by_axes.items()
    ]
    return Table(
        "collectives of one step",
        ("phase", "kind", "axes", ">count", ">bytes per rank"),
        tuple(rows),
    )


def _count(summary: Summary, axes: str) -> int:
    return sum(",".join(one.axes) == axes for one in summary.collectives)


def _memory(summary: Summary) -> Table:
    rows = []
    for name, text in _MEMORY.items():
        size = summary.memory[name]
        if name in ("buffers", "optimizer") and not size.most and not size.one_device:
            continue
        if name == "optimizer":
            text += f" ({summary.optimizer})"
        rows.append((text, *_sizes(size)))
    return Table("bytes of one step", ("", ">bytes per rank", ">one device"), tuple(rows))


def _flops(summary: Summary) -> str:
    alone, spread = summary.flops.one_device or 0, summary.flops
    most = f"{spread.most:.3e}" if spread.is_even else f"at most {spread.most:.3e}"
    text = f"floating-point operations of one step: {most} per rank"
    if alone:
        share = spread.most / alone
        text += f", {alone:.3e} on one device: {share:.4f} of it (1/{summary.ranks} = "
        text += f"{1 / summary.ranks:.4f})"
    return text


def _reshards(reshards: Sequence[Reshard]) -> Table:
    lines = []
    for one in reshards:
        reason, _, place = one.consumer.partition(" in ")
        kind, _, path = reason.partition(" ")
        if path:  # what leaves the program: `grad blocks.0.mlp.up.weight`
            reason = _LEAVES.get(kind, kind)
            place = "the net" if kind == "output" else path
        lines.append((place, (one.source, one.target, ", ".join(one.kinds), reason)))
    rows = []
    for place, count, (source, target, kinds, consumer) in fold(lines):
        rows.append((place, _times(count), source, target, kinds, consumer))
    heads = ("wanted in", ">", "from", "to", "by", "because of")
    return Table("changes of layout", heads, tuple(rows))


def _notes(title: str, notes: Sequence[Note], kinds: Sequence[str]) -> Table:
    found = [note.text for note in notes if note.kind in kinds]
    folded = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", text) for text in found)
    return Table(title, ("",), tuple((text,) for text in folded))


def _others(notes: Sequence[Note]) -> list[Block]:
    known = ("no rule", "uneven")
    others = tuple((note.text,) for note in notes if note.kind not in known)
    return [Table("notes", ("",), others)] if others else []


def _times(count: int) -> str:
    return f"x{count}" if count > 1 else ""


def _sizes(spread: Spread) -> tuple[str, str]:
    return _bytes(spread), "" if spread.one_device is None else human(spread.one_device)


def _bytes(spread: Spread) -> str:
    if spread.is_even:
        return human(spread.most)
    return f"{human(spread.least)} to {human(spread.most)} (rank {spread.worst})"
