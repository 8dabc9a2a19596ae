"""What a rank says when it fails, and how it takes the job down."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType

from torch import distributed as dist

from distcell.compat import Store
from distcell.errors import DistcellError
from distcell.runtime import world

STORE_IS_GONE = (dist.DistStoreError, dist.DistNetworkError)

_PATIENCE = timedelta(seconds=5)
_NEVER = timedelta(days=365)
_INTERRUPTED = 130
_OTHERS_FIRST_S = 1.0
_LINE = 160
_STORE_HELD_S = 0.2


def run_to_the_end(body: Callable[[], None], script: str) -> int:
    """Runs the script's body and returns 0 when all ranks have ended it well.

    Where it fails on one of several ranks, the process ends here, and all others with it.

    Args:
        body: What to run.
        script: The path of the script: tracebacks begin there.
    """
    try:
        body()
    except SystemExit as exit_:
        return _leave(_exit_code(exit_))
    except KeyboardInterrupt:
        return _fail("", _INTERRUPTED)
    except DistcellError as error:
        return _fail(error.render(), error.exit_code, cause=error.message)
    except BaseException as error:  # a rank that dies must say so and take the others with it
        if any(log.pending for log in world.collective_logs()):
            time.sleep(_OTHERS_FIRST_S)  # most likely another rank is gone, and says why
        text = "".join(traceback.format_exception(error.with_traceback(_from(script, error))))
        return _fail(text.rstrip(), 1, cause=f"{type(error).__name__}: {error}".splitlines()[0])
    return _leave(0)


def report_once(store: Store | None, text: str, *, cause: str) -> None:
    """Prints the text, unless another rank did for the same cause; other causes add one line.

    Returns when the first report is on the screen, so that the job may be taken down.

    Args:
        store: The store that all ranks reach; None for a single rank.
        text: The report.
        cause: What it comes down to, in one line: equal on ranks that fail for the same reason.
    """
    if store is None:
        _print(text)
        return
    rank = world.current_world().rank
    try:
        if store.add("fault/reports", 1) == 1:
            store.set("fault/cause", cause)
            _print(text if text.startswith("error:") else f"rank {rank} failed:\n{text}")
            store.set("fault/printed", "yes")
            time.sleep(_STORE_HELD_S)  # this rank may hold the store that the others now ask
            return
        store.wait(["fault/printed"], _PATIENCE)
        first = store.get("fault/cause").decode()
    except STORE_IS_GONE:  # with the rank that holds it: nobody else will speak
        _print(f"rank {rank} failed:\n{text}")
        return
    if first != cause:
        _print(f"rank {rank} failed too: {cause[:_LINE]}")


def _leave(code: int) -> int:
    """Ends a rank that left the script by itself."""
    store = world.store()
    if store is None:
        return code
    here = world.current_world()
    if code:
        text = f"error: rank {here.rank} left the script with exit code {code}"
        report_once(store, text, cause=f"exit code {code}")
        world.abort(code)
    sys.stdout.flush()
    store.set(f"left/{here.rank}", "yes")
    # Rank 0 may hold the store, and MPI wants all ranks to be done: nobody goes before the others.
    if store.add("left/count", 1) == here.size:
        store.set("left/all", "yes")
    store.wait(["left/all"], _NEVER)
    return 0


def _fail(text: str, code: int, *, cause: str = "") -> int:
    store = world.store()
    if text:
        report_once(store, text, cause=cause)
    if store is not None:
        world.abort(code)
    return code


def _exit_code(exit_: SystemExit) -> int:
    if exit_.code is None or isinstance(exit_.code, int):
        return exit_.code or 0
    _print(str(exit_.code))
    return 1


def _from(script: str, error: BaseException) -> TracebackType | None:
    """The traceback without the launcher's own frames."""
    found = error.__traceback__
    while found is not None and found.tb_frame.f_code.co_filename != script:
        found = found.tb_next
    return found or error.__traceback__


def _print(text: str) -> None:
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
