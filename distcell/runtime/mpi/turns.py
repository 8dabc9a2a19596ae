"""In which order, and on which thread, the collectives of a group run."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from distcell.runtime.mpi.arrivals import Arrivals
from distcell.runtime.mpi.work import Work

_PATIENCE_S = 0.002  # ranks in step are nearer than this; handing over costs about as much
_NAP_S = 0.00005
_LAST_NAP_S = 0.0005


class Turn(Work):
    """A collective that has its place in the order of its group."""

    def __init__(self, turns: Turns, body: Callable[[], None], result: Any, number: int) -> None:
        super().__init__(result)
        self.turns = turns
        self.number = number
        self.body: Callable[[], None] | None = body

    def run(self) -> None:
        """Runs it, and keeps its error for who waits."""
        body, self.body = self.body, None  # what it holds is free when it has run
        assert body is not None
        error: Exception | None = None
        try:
            body()
        except Exception as raised:  # raised again by wait()
            error = raised
        self.settle(error)

    def finish(self, seconds: float | None) -> None:
        self.turns.finish(self, seconds)


class Turns:
    """Runs the collectives of one group one after the other, as they were issued.

    A collective that is waited for at once runs on the thread that calls; so does what that thread
    waits for later and nobody has begun. The others run on a thread of the group's own, when all
    ranks have issued them: a rank that waits in MPI would take the core from one that computes.
    Where no core is to spare and all ranks are there already, they run on the calling thread, too.
    What the future of a collective calls back may issue collectives: they run there and then, so
    that all ranks have them in the same order, whichever thread they are on.

    Args:
        name: Of the group, for messages.
        arrivals: How far each rank has come; None where that cannot be seen.
        spare: Whether there is a core for a second thread.
    """

    def __init__(self, name: str, arrivals: Arrivals | None, *, spare: bool) -> None:
        self._name = name
        self._arrivals = arrivals
        self._spare = spare
        self._running = threading.RLock()
        self._runner: int | None = None
        self._waiting: deque[Turn] = deque()
        self._issued = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def issue(self, body: Callable[[], None], result: Any, *, at_once: bool) -> Work:
        """Returns the work that runs `body` in its turn; ended already where it is `at_once`.

        Args:
            body: What is to be done.
            result: What the future of the work holds.
            at_once: Whether the caller waits for it.
        """
        number = 0 if self._arrivals is None else self._arrivals.announce()
        turn = Turn(self, body, result, number)
        if self._runner == threading.get_ident():  # called back from a collective
            turn.run()
        elif at_once or self._runs_through(turn):
            with self._running:
                self._run_all()
                self._run(turn)
        else:
            with self._issued:
                self._waiting.append(turn)
                self._start()
                self._issued.notify()
        return turn

    def finish(self, turn: Turn, seconds: float | None) -> None:
        """Returns when the turn has ended: runs it, and what comes before, if nobody does."""
        if seconds is not None:
            self._watch(turn, seconds)
            return
        while not turn.is_completed():
            with self._running:
                if not turn.is_completed() and self._waiting:
                    self._run(self._waiting.popleft())

    def close(self, *, drop: bool = False) -> None:
        """Runs what was issued and ends the thread.

        Args:
            drop: Leave undone what has not begun.
        """
        if drop:
            while self._waiting:
                self._waiting.popleft().settle(RuntimeError("the process group was aborted"))
        else:
            with self._running:
                self._run_all()
        with self._issued:
            self._closed = True
            self._issued.notify()
        thread = self._thread
        if thread is not None and not drop and thread is not threading.current_thread():
            thread.join()

    def _runs_through(self, turn: Turn) -> bool:
        """Whether nobody has to be waited for, and no other core could do it meanwhile."""
        if self._spare or self._arrivals is None:
            return False
        deadline = time.monotonic() + _PATIENCE_S
        while not self._arrivals.all_at(turn.number):
            if time.monotonic() > deadline:
                return False
            time.sleep(0)
        return True

    def _watch(self, turn: Turn, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not turn.is_completed():
            if time.monotonic() > deadline:
                missing = self._arrivals.missing(turn.number) if self._arrivals else []
                who = f"; rank {', '.join(map(str, missing))} has not issued it" if missing else ""
                raise TimeoutError(
                    f"a collective of {self._name} took longer than {seconds} s{who}"
                )
            time.sleep(_NAP_S)

    def _run_all(self) -> None:
        while self._waiting:
            self._run(self._waiting.popleft())

    def _run(self, turn: Turn) -> None:
        before, self._runner = self._runner, threading.get_ident()
        try:
            turn.run()
        finally:
            self._runner = before

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while True:
            with self._issued:
                self._issued.wait_for(lambda: self._waiting or self._closed)
                turn = self._waiting[0] if self._waiting else None
            if turn is None:
                return
            self._await_all(turn)
            with self._running:
                if self._waiting and self._waiting[0] is turn:
                    self._run(self._waiting.popleft())
                    self._report(turn)

    def _await_all(self, turn: Turn) -> None:
        """Returns when all ranks have issued it, or somebody has taken it over."""
        nap = _NAP_S
        while self._arrivals is not None and not turn.is_completed():
            if self._arrivals.all_at(turn.number):
                return
            time.sleep(nap)
            nap = min(1.5 * nap, _LAST_NAP_S)

    def _report(self, turn: Turn) -> None:
        error = turn.exception()
        if error is not None:  # who waits gets it too; but another collective may hang before
            sys.stderr.write(f"{self._name}: a collective failed: {error}\n")
