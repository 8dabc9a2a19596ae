"""Layers that are alike, shown once: `blocks.0-11.mlp.up.weight`."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

_Content = TypeVar("_Content", bound=Hashable)


def fold(items: Iterable[tuple[str, _Content]]) -> list[tuple[str, int, _Content]]:
    """The items with equal content whose paths differ in numbers alone, each group once.

    Args:
        items: Pairs of a dotted path and its content.

    Returns:
        For each group its path, how many there are, and the content; in the order in which the
        first of each comes.

    Example:
        >>> fold([("blocks.0.up", "a"), ("head", "b"), ("blocks.1.up", "a"), ("blocks.2.up", "c")])
        [('blocks.0-1.up', 2, 'a'), ('head', 1, 'b'), ('blocks.2.up', 1, 'c')]
    """
    groups: dict[tuple[str, _Content], list[tuple[int, ...]]] = {}
    for path, content in items:
        numbers = tuple(int(part) for part in path.split(".") if part.isdigit())
        groups.setdefault((_pattern(path), content), []).append(numbers)
    folded = []
    for (pattern, content), found in groups.items():
        for path, count in _paths(pattern, found):
            folded.append((path, count, content))
    return folded


def _pattern(path: str) -> str:
    return ".".join("#" if part.isdigit() else part for part in path.split("."))


def _paths(pattern: str, found: Sequence[tuple[int, ...]]) -> list[tuple[str, int]]:
    """One path for all where the numbers are every combination; else one for each."""
    distinct = [sorted(set(column)) for column in zip(*found, strict=True)]
    if len(set(found)) == math.prod(map(len, distinct)):
        return [(_fill(pattern, [ranges(column) for column in distinct]), len(found))]
    return [(_fill(pattern, list(map(str, numbers))), 1) for numbers in found]


def _fill(pattern: str, texts: Sequence[str]) -> str:
    left = iter(texts)
    return re.sub("#", lambda _: next(left), pattern)


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as they are printed.

    Example:
        >>> ranges([0, 1, 2, 5, 7, 8])
        '0-2,5,7-8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
