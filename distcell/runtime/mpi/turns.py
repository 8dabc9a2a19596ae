"""In which order, and on which thread, the collectives of a group run."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from distcell.runtime.mpi.work import Work


class Turn(Work):
    """A collective that has its place in the order of its group."""

    def __init__(self, turns: Turns, body: Callable[[], None], result: Any) -> None:
        super().__init__(result)
        self.turns = turns
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
    waits for later and nobody has begun. The others run on a thread of the group's own. What the
    future of a collective calls back may issue collectives too: they run there and then, so that
    all ranks have them in the same order, whichever thread they are on.
    """

    def __init__(self, name: str) -> None:
        self._name = name
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
        turn = Turn(self, body, result)
        if self._runner == threading.get_ident():  # called back from a collective
            turn.run()
        elif at_once:
            with self._running:
                while self._waiting:
                    self._run_next()
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
                    self._run_next()

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
                while self._waiting:
                    self._run_next()
        with self._issued:
            self._closed = True
            self._issued.notify()
        thread = self._thread
        if thread is not None and not drop and thread is not threading.current_thread():
            thread.join()

    def _watch(self, turn: Turn, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not turn.is_completed():
            if time.monotonic() > deadline:
                raise TimeoutError(f"a collective of {self._name} took longer than {seconds} s")
            time.sleep(0.0005)

    def _run_next(self) -> None:
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
                if self._closed and not self._waiting:
                    return
            with self._running:
                turn = self._waiting[0] if self._waiting else None
                if turn is not None:
                    self._run_next()
            if turn is not None and turn.exception() is not None:
                # Who waits gets it too; but another collective may hang before.
                text = f"{self._name}: a collective failed: {turn.exception()}\n"
                sys.stderr.write(text)
