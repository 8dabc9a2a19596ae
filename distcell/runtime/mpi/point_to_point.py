"""Messages between two ranks: issued without blocking, on their way without being waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from distcell.runtime.mpi.work import Work

_SPINS = 200  # tests before a waiting rank leaves the core to others
_FIRST_S = 0.0005
_LAST_S = 0.002
_NAP_S = 0.00005


class Message(Work):
    """A send or receive on its way.

    Args:
        requests: MPI's handles of its pieces.
        result: The tensors; kept until it has arrived.
        after: What is to be done with what was received.
        more: Given the source, receives the pieces after the first; for a receive from any rank.
    """

    def __init__(
        self,
        requests: list[MPI.Request],
        result: Any,
        after: Callable[[], None] | None = None,
        *,
        more: Callable[[int], list[MPI.Request]] | None = None,
    ) -> None:
        super().__init__(result)
        self._requests = requests
        self._after = after
        self._more = more
        self._source = -1
        self._testing = threading.Lock()

    def poll(self) -> bool:
        """Returns whether it has ended; moves it on if not."""
        if self._done or not self._testing.acquire(blocking=False):
            return self._done
        try:
            if not self._arrived():
                return False
            if self._after is not None:
                self._after()
        except Exception as error:  # raised again by wait()
            self._end(error)
        else:
            self._end(None)
        finally:
            self._testing.release()
        return True

    def finish(self, seconds: float | None) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        spins = 0
        while not self.poll():
            spins += 1
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"a message took longer than {seconds} s")
            if spins > _SPINS:
                time.sleep(_NAP_S)
            elif spins % 8 == 0:
                time.sleep(0)

    def source_rank(self) -> int:
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def _arrived(self) -> bool:
        while self._requests:
            status = MPI.Status()
            if not self._requests[0].Test(status):
                return False
            self._requests.pop(0)
            self._source = status.Get_source()
            if self._more is not None:
                self._requests += self._more(self._source)
                self._more = None
        return True

    def _end(self, error: Exception | None) -> None:
        self._requests, self._after = [], None
        self.settle(error)


class Courier:
    """Moves messages on that nobody waits for: MPI does so only while it is called.

    One for the process; its thread lives while there are such messages.
    """

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._changed = threading.Lock()
        self._thread: threading.Thread | None = None

    def take(self, message: Message) -> None:
        """Looks after a message from now on, unless it has arrived."""
        if message.poll():
            return
        with self._changed:
            self._messages.append(message)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="distcell-courier", daemon=True
                )
                self._thread.start()

    def finish(self) -> None:
        """Returns when all messages have arrived."""
        for message in tuple(self._messages):
            message.finish(None)
        thread = self._thread
        if thread is not None:
            thread.join()

    def _serve(self) -> None:
        nap = _FIRST_S
        while True:
            time.sleep(nap)
            nap = min(2 * nap, _LAST_S)
            arrived = {id(message) for message in tuple(self._messages) if message.poll()}
            with self._changed:
                self._messages = [m for m in self._messages if id(m) not in arrived]
                if not self._messages:
                    self._thread = None
                    return


courier = Courier()
