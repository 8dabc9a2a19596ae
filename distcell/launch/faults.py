"""What a rank says when it fails, and how it takes the job down."""

from __future__ import annotations

import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType

from torch import distributed as dist

from distcell.compat import Store
from distcell.errors import DistcellError
from distcell.launch import monitor
from distcell.launch.standing import Standing, standing_at_end
from distcell.runtime import world

STORE_IS_GONE = (dist.DistStoreError, dist.DistNetworkError)

WAKE = "wake"
"""The key that wakes the watchdogs of all ranks; its value is one of the two below."""
FAULT, STALL = "fault", "stall"

_PATIENCE = timedelta(seconds=8)
_NEVER = timedelta(days=365)
_INTERRUPTED = 130
_OTHERS_FIRST_S = 1.0
_LINE = 160
_STORE_HELD_S = 0.2
_ANSWERS_S = 1.2
_SETTLED_S = 0.5
_LISTED = 16


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
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it may come from two sides
        return _fail("", _INTERRUPTED)
    except DistcellError as error:
        return _fail(error.render(), error.exit_code, cause=error.message)
    except BaseException as error:  # a rank that dies must say so and take the others with it
        if any(each.log.pending for each in world.collectives_in_use()):
            time.sleep(_OTHERS_FIRST_S)  # most likely another rank is gone, and says why
        text = "".join(traceback.format_exception(error.with_traceback(_from(script, error))))
        return _fail(text.rstrip(), 1, cause=f"{type(error).__name__}: {error}".splitlines()[0])
    return _leave(0)


def report_once(store: Store | None, text: str, *, cause: str, alone: bool = False) -> None:
    """Prints the text and a line for each other rank, unless another rank has reported.

    Returns when the first report is on the screen, so that the job may be taken down.

    Args:
        store: The store that all ranks reach; None for a single rank.
        text: The report.
        cause: What it comes down to, in one line: equal on ranks that fail for the same reason.
        alone: Whether the text speaks of all ranks already.
    """
    if store is None:
        _print(text)
        return
    rank = world.current_world().rank
    try:
        if store.add("fault/reports", 1) == 1:
            _report_first(store, text, cause, alone=alone)
            return
        store.set(f"failed/{rank}", Standing(failed=cause[:_LINE]).to_json())
        store.wait(["fault/printed"], _PATIENCE)
        first, listed = store.get("fault/cause").decode(), store.check([f"listed/{rank}"])
    except STORE_IS_GONE:  # with the rank that holds it: nobody else will speak
        _print(f"{_name()} failed:\n{text}")
        return
    if first != cause and not listed:
        _print(f"{_name()} failed too: {cause[:_LINE]}")


def end_job(code: int) -> None:
    """Ends this rank and all others, after what is wrong has been said.

    Args:
        code: The exit code; not 0.
    """
    monitor.say_nothing_more()
    world.abort(code)


def _report_first(store: Store, text: str, cause: str, *, alone: bool) -> None:
    store.set("fault/cause", cause)
    _print(text if text.startswith("error:") else f"{_name()} failed:\n{text}")
    if not alone:
        if store.add("wake/claims", 1) == 1:
            store.set(WAKE, FAULT)
        lines = _others(store, cause)
        if lines:
            _print("\n".join(f"  |  {line}" for line in lines))
    store.set("fault/printed", "yes")
    time.sleep(_STORE_HELD_S)  # this rank may hold the store that the others now ask


def _others(store: Store, cause: str) -> list[str]:
    """A line for each other rank that does not fail for the same reason."""
    here = world.current_world()
    others = [rank for rank in range(here.size) if rank != here.rank]
    deadline = time.monotonic() + _ANSWERS_S
    found = {rank: _standing_of(store, rank) for rank in others}
    while not all(map(_is_settled, found.values())) and time.monotonic() < deadline:
        time.sleep(0.05)
        for rank, standing in found.items():
            if not _is_settled(standing):
                found[rank] = _standing_of(store, rank)
    lines = []
    for rank, standing in found.items():
        if standing is not None and standing.failed:
            store.set(f"listed/{rank}", "yes")
            if standing.failed == cause[:_LINE]:
                continue
        lines.append(f"rank {rank} {standing or 'does not answer'}")
    more = len(lines) - _LISTED
    return lines[:_LISTED] + ([f"and {more} more"] if more > 0 else [])


def _standing_of(store: Store, rank: int) -> Standing | None:
    for key in (f"failed/{rank}", f"left/{rank}", f"stands/{rank}"):
        if store.check([key]):
            return Standing.from_json(store.get(key))
    return None


def _is_settled(standing: Standing | None) -> bool:
    """Whether a rank will stay where it is; one that has just begun to wait may go on."""
    if standing is None:
        return False
    waits = standing.waits
    is_stuck = waits is not None and waits.seconds > _SETTLED_S
    return bool(standing.failed) or standing.left or is_stuck


def _leave(code: int) -> int:
    """Ends a rank that left the script by itself."""
    store = world.store()
    if store is None:
        return code
    here = world.current_world()
    if code:
        text = f"error: {_name()} left the script with exit code {code}"
        report_once(store, text, cause=f"exit code {code}")
        end_job(code)
    sys.stdout.flush()
    store.set(f"left/{here.rank}", standing_at_end().to_json())
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
        end_job(code)
    return code


def _name() -> str:
    """This rank, with its host where there are several."""
    here = world.current_world()
    host = f" on {socket.gethostname()}" if here.local_size < here.size else ""
    return f"rank {here.rank}{host}"


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
