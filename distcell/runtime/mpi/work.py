"""What a collective returns: its state, its error, its future."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from threading import Lock
from typing import Any

from torch.futures import Future

from distcell.compat import PythonWork

_FOREVER = timedelta(0)  # what torch passes when no time is given


class Work(PythonWork):  # type: ignore[misc]
    """A collective or message that runs, or has run.

    Subclasses say how to wait for it.

    Args:
        result: What its future holds: the list of its output tensors.
    """

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result
        self._error: Exception | None = None
        self._done = False
        self._future: Future[Any] | None = None
        self._settling = Lock()

    def settle(self, error: Exception | None) -> None:
        """Notes that it has ended. What waits for its future runs now, on this thread."""
        with self._settling:
            self._error = error
            self._done = True
            future = self._future
        if future is not None:
            _fill(future, self._result, error)

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        """Returns when it has ended; raises the error that it ended with."""
        if not self._done:
            self.finish(None if timeout <= _FOREVER else timeout.total_seconds())
        if self._error is not None:
            raise self._error
        return True

    def finish(self, seconds: float | None) -> None:
        """Returns when it has ended; raises `TimeoutError` when that takes longer."""
        raise NotImplementedError

    def is_completed(self) -> bool:
        return self._done

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> Any:
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def get_future(self) -> Future[Any]:
        """Returns a future of the list of output tensors."""
        with self._settling:
            future = self._future
            if future is not None:
                return future
            future = self._future = Future()
            done = self._done
        if done:
            _fill(future, self._result, self._error)
        return future


class Together(Work):
    """Several pieces of work as one: it ends with the last of them.

    Args:
        parts: What is waited for.
    """

    def __init__(self, parts: list[Work]) -> None:
        super().__init__([tensor for part in parts for tensor in part.result()])
        self._parts = parts
        self._left = len(parts)
        self._counting = Lock()
        if not parts:
            self.settle(None)
        for part in parts:
            part.get_future().add_done_callback(self._ended(part))

    def finish(self, seconds: float | None) -> None:
        for part in self._parts:
            part.finish(seconds)

    def _ended(self, part: Work) -> Callable[[Any], None]:
        def note(_future: Any) -> None:
            with self._counting:
                self._left -= 1
                last = self._left == 0
            if last:
                errors = [one.exception() for one in self._parts]
                self.settle(next((error for error in errors if error is not None), None))

        return note


def _fill(future: Future[Any], result: Any, error: Exception | None) -> None:
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
