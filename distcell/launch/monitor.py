"""The process beside a rank: it outlives the rank, and says what the rank cannot say itself.

A rank that the kernel or a user kills has no last word, and MPICH does not tell which one it was.
So the process that a launcher starts forks, before anything is initialised: the child is the rank,
the parent waits for it. It speaks before it ends, and only then does the launcher see that a rank
is gone and end the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from distcell.errors import LaunchError
from distcell.launch.output import Output

_DIE_WITH_PARENT, _NAME, _ADOPT_ORPHANS = 1, 15, 36  # of prctl
_FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_ASKED_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

_STARTUP_FILE = "/dev/shm/mpich_shm_"

LAUNCHER_PID = "DISTCELL_LAUNCHER_PID"
"""Names the process of `-n N` that started this one; unset under other launchers."""

_spoken: int | None = None


def start_rank(rank: int, output: Output | None = None) -> None:
    """Returns in a new process, which is the rank; the old one waits for it and ends like it.

    Elsewhere than on Linux it returns in the old one.

    Args:
        rank: Its number.
        output: Copies what it prints; None leaves that to it.

    Raises:
        LaunchError: Its output is to be copied, and this is no Linux.
    """
    global _spoken  # noqa: PLW0603 (a process is one rank)
    if not sys.platform.startswith("linux"):
        if output is not None:
            raise LaunchError("--prefix and --log-dir need Linux", hint="leave them out")
        return
    sys.stdout.flush()
    sys.stderr.flush()
    launcher = os.environ.pop(LAUNCHER_PID, None)
    if launcher is not None:
        die_with(int(launcher))
    watcher = os.getpid()
    listens, speaks = os.pipe()
    child = os.fork()
    if child:
        os.close(speaks)
        _watch(child, rank, listens, output, by_signal=launcher is None)
    os.close(listens)
    die_with(watcher)
    _spoken = speaks
    if output is not None:
        output.connect_rank()


def say_nothing_more() -> None:
    """Tells the process beside this rank that the cause of its end has been said."""
    if _spoken is not None:
        with contextlib.suppress(BrokenPipeError):
            os.write(_spoken, b"s")


def die_with(parent: int) -> None:
    """Makes the kernel end this process when its parent ends.

    Args:
        parent: The process that started this one.
    """
    _prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def _watch(
    child: int, rank: int, listens: int, output: Output | None, *, by_signal: bool
) -> NoReturn:
    """Waits for the rank and ends like it; `by_signal` where our launcher does not look on."""
    _prctl(_NAME, ctypes.c_char_p(b"distcell-watch"))
    _prctl(_ADOPT_ORPHANS, 1)
    asked: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    if output is not None:
        output.copy_until_end(child)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code:
        _end_orphans()
        _unlink_startup_files()
    os.set_blocking(listens, False)
    with contextlib.suppress(BlockingIOError):
        if os.read(listens, 1):
            os._exit(code if code > 0 else 1)  # it had its last word
    was_asked = any(number in asked for number in _ASKED_TO_END)
    if code and not was_asked and code != -signal.SIGINT:
        text = f"{last_word(rank, code).render()}\n".encode()
        if output is not None:
            output.write(2, text)
        else:
            os.write(2, text)
    if code > 0:
        _tell_mpich(code)
    if code < 0 and by_signal:
        _end_by_signal(-code)
    os._exit(code if code >= 0 else 128 - code)


def last_word(rank: int, code: int) -> LaunchError:
    """Returns what is said of a rank that could not say it.

    Args:
        rank: Its number.
        code: How it ended: below 0 the signal.
    """
    where = f"rank {rank} on {socket.gethostname()}"
    if code > 0:
        return LaunchError(
            f"{where} ended with exit code {code} inside of the script",
            hint="something called os._exit, or a library ended the process; see the lines above",
        )
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if name == "SIGKILL":
        hint = "somebody killed it, or the host is out of memory: see `dmesg`"
    else:
        hint = "run the script with `python -X faulthandler` to see where"
    return LaunchError(f"{where} was ended by {name}", hint=hint)


def _tell_mpich(code: int) -> None:
    """Ends the job: MPICH's mpirun takes an exit code alone for a rank that is done."""
    channel = os.environ.get("PMI_FD", "")
    if channel.isdigit():
        with contextlib.suppress(OSError):
            os.write(int(channel), f"cmd=abort exitcode={code}\n".encode())


def _end_by_signal(number: int) -> NoReturn:
    """Ends this process by the signal that ended the rank, so that the launcher sees the same."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has left its own core
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os._exit(128 + number)


def _end_orphans() -> None:
    """Ends what the rank had started, such as the workers of a loader: they are ours now."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while children.is_file() and (found := children.read_text().split()):
        for orphan in map(int, found):
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(orphan, 0)


def _unlink_startup_files() -> None:
    """Removes the names of the files that the ranks of this host share memory through.

    They have none once MPI has started, see `unlink_startup_files` of the runtime. A rank that dies
    in that moment leaves them to those who still have them open: the other ranks, which live until
    this process ends.
    """
    parents: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    watches = [pid for pid, parent in parents.items() if parent == os.getppid()]
    for rank in (pid for pid, parent in parents.items() if parent in watches):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{rank}/maps").read_text(errors="replace").splitlines():
                if _STARTUP_FILE in line and not line.endswith("(deleted)"):
                    Path(line.split(maxsplit=5)[5]).unlink(missing_ok=True)


def _prctl(option: int, value: object) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
