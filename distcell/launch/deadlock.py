"""Which ranks wait for what can never come.

A rank in a collective waits for the members of its group that have not issued theirs. Such a member
may still come while it computes; it will not when it has left the script, or when it waits itself
for ranks of which the same holds. No time needs to pass to know that.
"""

from __future__ import annotations

from collections.abc import Sequence

from distcell.launch.standing import Standing, Waiting

_OF_SOME = ("permute", "broadcast")
"""Collectives in which a rank may wait for some of the members only."""

_OF_EQUAL_SIZE = ("all_reduce", "reduce_scatter", "broadcast")


def stuck_ranks(standings: Sequence[Standing | None]) -> list[int]:
    """Returns the ranks that can never go on, in rising order.

    Args:
        standings: Where each rank stands; None for one that is not known to wait.

    Example:
        >>> third = Waiting("", 2.0, "all_reduce", 8, (0, 1), "dp=2 dp", turn=3)
        >>> waits = Standing(third, turns={"dp=2 dp": 3})
        >>> gone = Standing(left=True, turns={"dp=2 dp": 2})
        >>> stuck_ranks([waits, gone]), stuck_ranks([waits, None])
        ([0], [])
    """
    waits = {
        rank: each.waits
        for rank, each in enumerate(standings)
        if each is not None and each.waits is not None and not each.left
    }
    gone = {rank for rank, each in enumerate(standings) if each is not None and each.left}
    able = {rank for rank in range(len(standings)) if rank not in waits and rank not in gone}
    while True:
        more = {
            rank
            for rank in waits.keys() - able
            if not _differs(waits[rank], waits) and _can_finish(waits[rank], standings, able)
        }
        if not more:
            return sorted(waits.keys() - able)
        able |= more


def _can_finish(waiting: Waiting, standings: Sequence[Standing | None], able: set[int]) -> bool:
    missing = [rank for rank in waiting.group if not _has_come(standings[rank], waiting)]
    if not missing:
        return True
    coming = [rank for rank in missing if rank in able]
    return bool(coming) if waiting.kind in _OF_SOME else len(coming) == len(missing)


def _has_come(standing: Standing | None, waiting: Waiting) -> bool:
    return standing is not None and standing.turns.get(waiting.line, 0) >= waiting.turn


def _differs(waiting: Waiting, waits: dict[int, Waiting]) -> bool:
    """Whether another member waits in another collective at the same turn."""
    for rank in waiting.group:
        other = waits.get(rank)
        if other is None or (other.line, other.turn) != (waiting.line, waiting.turn):
            continue
        if other.kind != waiting.kind:
            return True
        if waiting.kind in _OF_EQUAL_SIZE and other.nbytes != waiting.nbytes:
            return True
    return False
