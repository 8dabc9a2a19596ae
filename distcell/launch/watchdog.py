"""Ends a job in which a collective does not finish, and says which ranks are missing."""

from __future__ import annotations

import json
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from distcell.compat import clone_store
from distcell.errors import StallError
from distcell.launch.faults import STORE_IS_GONE, report_once
from distcell.runtime import world
from distcell.runtime.collectives import LogEntry

_LONGEST_PAUSE_S = 1.0
_ANSWERS_S = 4.0
_OWN_CODE = str(Path(__file__).resolve().parent.parent)


class Watchdog(threading.Thread):
    """Watches the collectives of this rank, and answers for it when another rank reports a stall.

    Args:
        stall_after: The seconds that a collective may take.
    """

    def __init__(self, stall_after: float) -> None:
        super().__init__(name="distcell-watchdog", daemon=True)
        self._stall_after = stall_after
        self._main = threading.main_thread().ident
        self._ended = threading.Event()
        shared = world.store()
        # Of its own: the main thread may block for long in a request over the shared connection.
        self._store = clone_store(shared) if shared is not None else None

    def run(self) -> None:
        """Looks at the logs until a collective is overdue, here or elsewhere."""
        if self._store is None:
            return
        pause = min(_LONGEST_PAUSE_S, self._stall_after / 5)
        try:
            while not self._overdue() and not self._store.check(["stall/first"]):
                if self._ended.wait(pause):
                    return
            self._answer(reports=self._store.add("stall/first", 1) == 1)
        except STORE_IS_GONE:  # the job is ending for another reason
            return

    def end(self) -> None:
        """Stops watching. A thread inside of the store when Python ends would take it down."""
        self._ended.set()
        self.join()

    def _overdue(self) -> bool:
        entry = _pending()
        return entry is not None and time.monotonic() - entry.started > self._stall_after

    def _answer(self, *, reports: bool) -> None:
        assert self._store is not None
        here = world.current_world()
        self._store.set(f"stall/{here.rank}", json.dumps(self._status()))
        if reports:
            error = stall_error(self._statuses(here.size), self._stall_after)
            report_once(self._store, error.render(), cause=error.message)
            self._store.set("stall/printed", "yes")
        else:
            self._store.wait(["stall/printed"], timedelta(seconds=3 * _ANSWERS_S))
        world.abort(StallError.exit_code)

    def _status(self) -> dict[str, Any]:
        entry, last = _pending(), _last()
        return {
            "waits": str(entry) if entry else "",
            "seconds": time.monotonic() - entry.started if entry else 0.0,
            "last": str(last) if last else "",
            "at": _script_line(self._main),
        }

    def _statuses(self, size: int) -> list[dict[str, Any] | None]:
        """What each rank answered; None for one that has not after a while."""
        assert self._store is not None
        deadline = time.monotonic() + _ANSWERS_S
        found: list[dict[str, Any] | None] = [None] * size
        while None in found and time.monotonic() < deadline:
            for rank in range(size):
                if found[rank] is not None:
                    continue
                if self._store.check([f"left/{rank}"]):  # first: its watchdog answers too
                    found[rank] = {"left": True}
                elif self._store.check([f"stall/{rank}"]):
                    found[rank] = json.loads(self._store.get(f"stall/{rank}"))
            time.sleep(0.05)
        return found


def stall_error(statuses: list[dict[str, Any] | None], stall_after: float) -> StallError:
    """Returns the error that says where each rank is.

    Args:
        statuses: What each rank answered, in rank order; None for a rank that did not.
        stall_after: The seconds that were waited.

    Example:
        >>> waits = {"waits": "#3 all_reduce over dp, 8 bytes", "seconds": 9.0}
        >>> print(stall_error([waits, None], 9.0))
        a collective did not finish within 9 s
          |  rank 0 waits for 9 s in #3 all_reduce over dp, 8 bytes
          |  rank 1 does not answer
          = hint: look at what rank 1 does instead; --stall-after S waits longer
    """
    lines = [f"rank {rank} {_place(status)}" for rank, status in enumerate(statuses)]
    missing = [str(r) for r, status in enumerate(statuses) if not (status or {}).get("waits")]
    if missing:
        hint = f"look at what rank {', '.join(missing)} does instead; --stall-after S waits longer"
    else:
        hint = "all ranks wait, in different collectives: their programs differ"
    return StallError(
        f"a collective did not finish within {stall_after:g} s", where=lines, hint=hint
    )


def _place(status: dict[str, Any] | None) -> str:
    if status is None:
        return "does not answer"
    if status.get("left"):
        return "has left the script"
    if status["waits"]:
        return f"waits for {status['seconds']:.0f} s in {status['waits']}"
    last = f"; its last was {status['last']}" if status["last"] else ""
    return f"is in no collective, but at {status['at']}{last}"


def _pending() -> LogEntry | None:
    entries = [log.pending for log in world.collective_logs() if log.pending is not None]
    return min(entries, key=lambda entry: entry.started, default=None)


def _last() -> LogEntry | None:
    entries = [entry for log in world.collective_logs() if (entry := log.last()) is not None]
    return max(entries, key=lambda entry: entry.started, default=None)


def _script_line(thread: int | None) -> str:
    """Where a thread is: the innermost line that is not distcell's own."""
    frame = sys._current_frames().get(thread) if thread is not None else None
    while frame is not None and frame.f_code.co_filename.startswith(_OWN_CODE):
        frame = frame.f_back
    if frame is None:
        return "an unknown line"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
