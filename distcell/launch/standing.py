"""Where a rank stands: what it waits in, or what it does instead."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from distcell.runtime import world
from distcell.runtime.rank_collectives import RankCollectives

_OWN_CODE = str(Path(__file__).resolve().parent.parent)


@dataclass(frozen=True)
class Waiting:
    """A collective that a rank has issued and that has not finished.

    Args:
        text: How it is shown.
        seconds: How long ago it was issued.
        kind: Such as `all_reduce`.
        nbytes: Those of the rank's own input.
        group: The ranks that take part.
        line: The mesh and the axes: collectives of one line and one group come in one order.
        turn: The place in that order.
        number: The place among all collectives of the rank over that mesh.
    """

    text: str
    seconds: float
    kind: str = ""
    nbytes: int = 0
    group: tuple[int, ...] = ()
    line: str = ""
    turn: int = 0
    number: int = 0


@dataclass(frozen=True)
class Standing:
    """Where a rank stands.

    Args:
        waits: What it waits in; None when it is in no collective.
        last: The collective that it issued last.
        at: The line of the script that it is at.
        turns: By line how many collectives it has issued.
        left: Whether it has left the script.
        failed: In one line why it failed; empty when it has not.
        beat: How often it has said so while it waited.
    """

    waits: Waiting | None = None
    last: str = ""
    at: str = ""
    turns: Mapping[str, int] = field(default_factory=dict)
    left: bool = False
    failed: str = ""
    beat: int = 0

    def to_json(self) -> str:
        """Returns the text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Standing:
        """Returns what `to_json` wrote.

        >>> standing = Standing(Waiting("#1 barrier", 2.0, group=(0, 1)), turns={"dp=2 dp": 1})
        >>> Standing.from_json(standing.to_json()) == standing
        True
        """
        found = json.loads(text)
        waits = found.pop("waits")
        if waits is not None:
            waits = Waiting(**{**waits, "group": tuple(waits["group"])})
        return cls(waits, **found)

    def __str__(self) -> str:
        if self.failed:
            return f"failed too: {self.failed}"
        if self.left:
            return "has left the script"
        if self.waits is not None:
            return f"waits for {self.waits.seconds:.0f} s in {self.waits.text}"
        last = f"; its last was {self.last}" if self.last else ""
        return f"is in no collective, but at {self.at}{last}"


def standing_now(thread: int | None, *, beat: int = 0) -> Standing:
    """Returns where this rank stands.

    Args:
        thread: The thread that runs the script.
        beat: Goes into the answer.
    """
    in_use = world.collectives_in_use()
    pending = [(entry, each) for each in in_use if (entry := each.log.pending) is not None]
    entry, of = min(pending, key=lambda found: found[0].started, default=(None, None))
    waits = None
    if entry is not None and of is not None:
        waits = Waiting(
            str(entry),
            time.monotonic() - entry.started,
            entry.kind,
            entry.bytes,
            tuple(of.mesh.group_of(of.rank, entry.axes)),
            _line(of, entry.axes),
            entry.turn,
            entry.number,
        )
    entries = [last for each in in_use if (last := each.log.last()) is not None]
    last = max(entries, key=lambda found: found.started, default=None)
    return Standing(waits, str(last or ""), _script_line(thread), _turns(in_use), beat=beat)


def standing_at_end() -> Standing:
    """Returns how this rank left the script."""
    return Standing(turns=_turns(world.collectives_in_use()), left=True)


def lines_of(standings: Sequence[Standing | None]) -> list[str]:
    """Returns a line for each rank, in rank order; None for one that did not answer.

    >>> lines_of([Standing(at="t.py:3 in step"), None])
    ['rank 0 is in no collective, but at t.py:3 in step', 'rank 1 does not answer']
    """
    return [f"rank {rank} {each or 'does not answer'}" for rank, each in enumerate(standings)]


def _turns(in_use: Sequence[RankCollectives]) -> dict[str, int]:
    return {
        _line(each, axes): turn for each in in_use for axes, turn in tuple(each.log.turns.items())
    }


def _line(collectives: RankCollectives, axes: tuple[str, ...]) -> str:
    return f"{collectives.mesh} {','.join(axes)}"


def _script_line(thread: int | None) -> str:
    """Where a thread is: the innermost line that is not distcell's own."""
    frame = sys._current_frames().get(thread) if thread is not None else None
    while frame is not None and frame.f_code.co_filename.startswith(_OWN_CODE):
        frame = frame.f_back
    if frame is None:
        return "an unknown line"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
