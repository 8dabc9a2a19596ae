"""Ends a job in which a collective does not finish, and says which ranks are missing."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from distcell.compat import clone_store
from distcell.errors import StallError
from distcell.launch.deadlock import stuck_ranks
from distcell.launch.faults import FAULT, STALL, STORE_IS_GONE, WAKE, end_job, report_once
from distcell.launch.standing import Standing, lines_of, standing_now
from distcell.runtime import world

_LONGEST_PAUSE_S = 0.5
_ANSWERS_S = 4.0
_RETELL_S = 0.2


class Watchdog(threading.Thread):
    """Watches the collectives of this rank, and answers for it when another rank reports.

    A job ends when a collective takes longer than it may, and earlier when it is known that it
    never will: see deadlock.py. Each rank that waits says so in the store; rank 0 compares.

    Args:
        stall_after: The seconds that a collective may take. Those in which a rank works out what
            the others wait for do not count.
    """

    def __init__(self, stall_after: float) -> None:
        super().__init__(name="distcell-watchdog", daemon=True)
        self._stall_after = stall_after
        self._pause = min(_LONGEST_PAUSE_S, stall_after / 5)
        self._main = threading.main_thread().ident
        self._here = world.current_world()
        self._ended = threading.Event()
        self._beat = 0
        self._excused = ("", 0.0)  # a collective, and its seconds that do not count
        self._suspects: dict[int, tuple[int, int]] = {}
        shared = world.store()
        # Of its own: the main thread may block for long in a request over the shared connection.
        self._store = clone_store(shared) if shared is not None else None

    def run(self) -> None:
        """Looks at the collectives until one is overdue, here or elsewhere."""
        if self._store is None:
            return
        try:
            while not self._ended.wait(self._pause):
                if self._store.check([WAKE]):
                    self._answer(self._store.get(WAKE).decode())
                    return
                self._look()
        except STORE_IS_GONE:  # the job is ending for another reason
            return

    def end(self) -> None:
        """Stops watching. A thread inside of the store when Python ends would take it down."""
        self._ended.set()
        self.join()

    def _look(self) -> None:
        assert self._store is not None
        standing = standing_now(self._main, beat=self._beat + 1)
        waits = standing.waits
        if waits is not None and waits.seconds > self._pause:
            self._beat += 1
            self._store.set(f"waits/{self._here.rank}", standing.to_json())
            if self._is_overdue(standing):
                text = f"a collective did not finish within {self._stall_after:g} s"
                self._declare(text)
                return
        elif self._beat:
            self._store.set(f"waits/{self._here.rank}", "")
        if self._here.rank == 0:
            self._look_for_deadlock()

    def _is_overdue(self, standing: Standing) -> bool:
        assert self._store is not None
        assert standing.waits is not None
        collective, excused = self._excused
        if collective != standing.waits.text:
            excused = 0.0
        if self._store.add(world.PREPARING, 0) > 0:
            excused = standing.waits.seconds
        self._excused = (standing.waits.text, excused)
        return standing.waits.seconds - excused > self._stall_after

    def _look_for_deadlock(self) -> None:
        """Ends the job when the same ranks were seen to be stuck in the same collectives twice.

        What ranks say is older than a moment; what they say again after that moment held in it.
        """
        standings = [self._said_by(rank) for rank in range(self._here.size)]
        before, self._suspects = self._suspects, {}
        stuck = stuck_ranks(standings)
        for rank in stuck:
            standing = standings[rank]
            assert standing is not None
            assert standing.waits is not None
            self._suspects[rank] = (standing.waits.number, standing.beat)
        if stuck and before.keys() == self._suspects.keys():
            pairs = [(before[rank], self._suspects[rank]) for rank in stuck]
            if all(old[0] == new[0] and old[1] < new[1] for old, new in pairs):
                self._declare("the ranks wait for each other and none can go on")
            elif all(old[0] == new[0] for old, new in pairs):
                self._suspects = before  # one has not spoken again yet

    def _said_by(self, rank: int) -> Standing | None:
        assert self._store is not None
        for key in (f"left/{rank}", f"waits/{rank}"):
            if self._store.check([key]) and (text := self._store.get(key)):
                return Standing.from_json(text)
        return None

    def _declare(self, text: str) -> None:
        """Wakes all ranks for the report that this one makes, unless another wakes them now."""
        assert self._store is not None
        if self._store.add("wake/claims", 1) > 1:
            return
        self._store.set("stall/says", text)
        self._store.set("stall/by", str(self._here.rank))
        self._store.set(WAKE, STALL)

    def _answer(self, kind: str) -> None:
        assert self._store is not None
        if kind == FAULT:  # that rank ends the job, after it has shown where the others stand
            self._tell()
            while not self._ended.wait(_RETELL_S):
                self._tell()
        elif kind == STALL:
            self._tell()
            if int(self._store.get("stall/by")) == self._here.rank:
                text = self._store.get("stall/says").decode()
                error = stall_error(text, self._all_standings())
                report_once(self._store, error.render(), cause=error.message, alone=True)
                self._store.set("stall/printed", "yes")
            else:
                self._store.wait(["stall/printed"], timedelta(seconds=3 * _ANSWERS_S))
            end_job(StallError.exit_code)

    def _tell(self) -> None:
        assert self._store is not None
        self._store.set(f"stands/{self._here.rank}", standing_now(self._main).to_json())

    def _all_standings(self) -> list[Standing | None]:
        """What each rank answered; None for one that has not after a while."""
        assert self._store is not None
        deadline = time.monotonic() + _ANSWERS_S
        found: list[Standing | None] = [None] * self._here.size
        while None in found and time.monotonic() < deadline:
            for rank, standing in enumerate(found):
                for key in (f"left/{rank}", f"stands/{rank}"):
                    if standing is None and self._store.check([key]):
                        standing = found[rank] = Standing.from_json(self._store.get(key))
            time.sleep(0.05)
        return found


def stall_error(text: str, standings: Sequence[Standing | None]) -> StallError:
    """Returns the error that says where each rank is.

    Args:
        text: What is wrong, in one line.
        standings: What each rank answered, in rank order; None for a rank that did not.

    Example:
        >>> from distcell.launch.standing import Waiting
        >>> waits = Standing(Waiting("#3 all_reduce over dp, 8 bytes", 9.0))
        >>> print(stall_error("a collective did not finish within 9 s", [waits, None]))
        a collective did not finish within 9 s
          |  rank 0 waits for 9 s in #3 all_reduce over dp, 8 bytes
          |  rank 1 does not answer
          = hint: look at what rank 1 does instead; --stall-after S waits longer
    """
    missing = [
        str(rank)
        for rank, each in enumerate(standings)
        if each is None or each.left or each.waits is None
    ]
    if missing:
        hint = f"look at what rank {', '.join(missing)} does instead; --stall-after S waits longer"
    else:
        hint = "all ranks wait, in different collectives: their programs differ"
    return StallError(text, where=lines_of(standings), hint=hint)
