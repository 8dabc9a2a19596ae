"""Tables and paragraphs, drawn with rich on a terminal and as plain text elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True)
class Table:
    """A table.

    Args:
        title: What stands above it.
        columns: The heads. One that begins with `>` is of numbers: aligned to the right.
        rows: The cells as text.
        empty: What stands in place of a table without rows.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    empty: str = "none"


Block = Table | str


def render(blocks: Sequence[Block]) -> str:
    """The blocks as plain text, one blank line between them.

    Example:
        >>> print(render([Table("sizes", ("name", ">bytes"), (("x", "12"), ("yy", "3")))]))
        sizes
          name  bytes
          x        12
          yy        3
    """
    return "\n\n".join(b if isinstance(b, str) else _plain(b) for b in blocks)


def show(blocks: Sequence[Block], stream: TextIO) -> None:
    """Prints the blocks: with rules and colours where the stream is a terminal."""
    if not stream.isatty():
        print(render(blocks), file=stream)
        return
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    for block in blocks:
        if isinstance(block, str) or not block.rows:
            console.print(Text(render([block])))
            console.print()
            continue
        drawn = RichTable(
            title=block.title,
            title_justify="left",
            title_style="bold",
            show_header=any(head.lstrip(">") for head in block.columns),
        )
        for head in block.columns:
            drawn.add_column(head.lstrip(">"), justify="right" if head.startswith(">") else "left")
        for row in block.rows:
            drawn.add_row(*map(Text, row))
        console.print(drawn)
        console.print()


def _plain(table: Table) -> str:
    if not table.rows:
        return f"{table.title}: {table.empty}"
    heads = tuple(head.lstrip(">") for head in table.columns)
    widths = [max(map(len, column)) for column in zip(heads, *table.rows, strict=True)]
    numbers = [head.startswith(">") for head in table.columns]
    lines = [table.title]
    for row in (heads, *table.rows) if any(heads) else table.rows:
        cells = zip(row, widths, numbers, strict=True)
        text = "  ".join(c.rjust(w) if right else c.ljust(w) for c, w, right in cells)
        lines.append(f"  {text}".rstrip())
    return "\n".join(lines)
