"""Whether all ranks were started alike."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distcell.errors import RankMismatchError
from distcell.launch.command_line import Command
from distcell.launch.threads import usable_cores
from distcell.strategy.library import load_strategy

_COMPARED = {
    "script": "scripts",
    "content": "contents of the script",
    "arguments": "arguments",
    "strategy": "strategies",
    "strategy content": "contents of the strategy",
    "seed": "seeds",
}
_LISTED = 8


def describe(command: Command) -> dict[str, Any]:
    """Returns what a rank was started with, for the others to compare: JSON values."""
    strategy = command.strategy and load_strategy(command.strategy)
    return {
        "script": str(Path(command.script).resolve()),
        "content": hashlib.sha256(Path(command.script).read_bytes()).hexdigest()[:16],
        "arguments": " ".join(command.arguments),
        "strategy": command.strategy or "",
        "strategy content": strategy.digest if strategy else "",
        "seed": command.seed,
        "host": socket.gethostname(),
        "cores": usable_cores(),
    }


def check_agreement(described: Sequence[dict[str, Any]]) -> None:
    """Returns when all ranks were started alike.

    Args:
        described: What `describe` gave on each rank, in rank order.

    Raises:
        RankMismatchError: They differ; the message says in what and who.
    """
    for key, name in _COMPARED.items():
        ranks: dict[object, list[int]] = {}
        for rank, entry in enumerate(described):
            ranks.setdefault(entry[key], []).append(rank)
        if len(ranks) > 1:
            lines = [f"{_ranks(who)}: {value or 'none given'}" for value, who in ranks.items()]
            raise RankMismatchError(
                f"the ranks were started with different {name}",
                where=lines[:_LISTED],
                hint="start every rank with the same command and the same files",
            )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_LISTED])) + (", ..." if len(ranks) > _LISTED else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
