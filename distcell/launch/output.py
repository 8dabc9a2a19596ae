"""What a rank prints: marked with who it is, and kept in a file of its own."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from distcell.errors import LaunchError

COLOUR = "DISTCELL_COLOUR"
"""Set for ranks whose output goes to a terminal at the end, which they cannot see themselves."""

_CHUNK = 1 << 16
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)")
_COLOURS = (36, 33, 32, 35, 34, 31)  # of ANSI terminals


class Output:
    """The standard output and error of a rank, which another process reads line by line.

    It is made before that process and the rank part; each then calls its own methods.

    Args:
        rank: The number of the rank.
        prefix: Whether each line begins with rank and host.
        folder: Where the file `rank-<number>.log` is written; None writes none.

    Raises:
        LaunchError: The file cannot be written.
    """

    def __init__(self, rank: int, *, prefix: bool, folder: str | None) -> None:
        self._rank = rank
        self._prefix = prefix
        self._log = None if folder is None else _open(Path(folder) / f"rank-{rank}.log")
        self._pipes = {target: os.pipe() for target in (1, 2)}
        self._rest = {1: b"", 2: b""}

    def connect_rank(self) -> None:
        """In the rank: sends what is printed from now on to the other process."""
        for target, (reads, writes) in self._pipes.items():
            os.dup2(writes, target)
            os.close(reads)
            os.close(writes)
        for stream in (sys.stdout, sys.stderr):  # what was printed must not be lost when it dies
            with contextlib.suppress(AttributeError):
                stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]

    def copy_until_end(self, child: int) -> None:
        """In the other process: copies what the rank prints, until it has ended.

        Args:
            child: The process of the rank.
        """
        for _, writes in self._pipes.values():
            os.close(writes)
        ended = os.pidfd_open(child)
        with selectors.DefaultSelector() as selector:
            selector.register(ended, selectors.EVENT_READ, None)
            for target, (reads, _) in self._pipes.items():
                os.set_blocking(reads, False)
                selector.register(reads, selectors.EVENT_READ, target)
            alive = True
            while alive:
                for key, _ in selector.select():
                    if key.data is None:
                        alive = False
                    elif not self._copy(key.fd, key.data):
                        selector.unregister(key.fd)
        os.close(ended)
        for target, (reads, _) in self._pipes.items():  # not to their end: others may hold them
            while self._copy(reads, target):
                pass
            self.write(target, b"\n" if self._rest[target] else b"")

    def write(self, target: int, data: bytes) -> None:
        """Writes the whole lines of what came so far, each at once.

        Args:
            target: 1 for standard output, 2 for standard error.
            data: What has come; may end within a line.
        """
        data = self._rest[target] + data
        used = 0
        for line in _LINE.findall(data):
            used += len(line)
            if self._log is not None:
                os.write(self._log, line)
            mark = prefix_of(self._rank, os.environ, os.isatty(target)) if self._prefix else b""
            with contextlib.suppress(OSError):  # nobody listens any more; the file still does
                os.write(target, mark + line)
        self._rest[target] = data[used:]

    def _copy(self, source: int, target: int) -> bool:
        """Copies what is there; whether there was something."""
        try:
            data = os.read(source, _CHUNK)
        except BlockingIOError:
            return False
        if data:
            self.write(target, data)
        return bool(data)


def prefix_of(rank: int, environ: Mapping[str, str], is_terminal: bool) -> bytes:
    """Returns what stands before each line of a rank.

    Args:
        rank: The number of the rank.
        environ: Its environment: `NO_COLOR` is kept.
        is_terminal: Whether the line goes to a terminal.

    Example:
        >>> prefix_of(3, {}, False).startswith(b"3 ")
        True
        >>> prefix_of(3, {"NO_COLOR": "1"}, True) == prefix_of(3, {}, False)
        True
    """
    text = f"{rank} {socket.gethostname()} |"
    if (is_terminal or COLOUR in environ) and not environ.get("NO_COLOR"):
        text = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"
    return f"{text} ".encode()


def _open(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    except OSError as error:
        raise LaunchError(
            f"the log `{path}` cannot be written",
            where=[str(error)],
            hint="name another folder with --log-dir",
        ) from error
