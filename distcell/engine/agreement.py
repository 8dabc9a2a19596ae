"""What all ranks must agree on before a program runs.

It is compared, so that a difference is an error that says what differs, not a hang.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distcell.capture.source import user_line
from distcell.errors import DataError, RankMismatchError
from distcell.piece import plain
from distcell.runtime.collectives import Collectives

SAME_BATCH = (
    "every rank must pass the same global batch: leave a DistributedSampler out, seed "
    "the data alike; or say `data: local` in the strategy when each rank loads its part"
)

_HINTS = {
    "inputs": SAME_BATCH,
    "parameters": "seed all ranks alike before the network is made, or load one checkpoint",
    "call": "all ranks must call the network with tensors of the same shapes, in the same mode",
    "strategy": "start all ranks with the same strategy",
    "seed": "call torch.manual_seed with the same number on every rank",
    "program": "start all ranks with the same script, torch and distcell",
}


def check_agreement(collectives: Collectives, facts: Mapping[str, str]) -> None:
    """Compares what each rank says about itself.

    Args:
        collectives: Of all ranks.
        facts: By subject a digest or a short text.

    Raises:
        DataError: When the inputs differ.
        RankMismatchError: When anything else does, or a rank is not here.
    """
    found: Sequence[Mapping[str, str]] = exchange(
        collectives, "calls the network in a new way", facts
    )
    for subject in facts:
        said = [each.get(subject, "nothing") for each in found]
        if len(set(said)) == 1:
            continue
        kind = DataError if subject == "inputs" else RankMismatchError
        raise kind(
            f"the ranks differ in: {subject}", where=lines_by_rank(said), hint=_HINTS.get(subject)
        )


def exchange(collectives: Collectives, doing: str, facts: Mapping[str, Any]) -> list[Any]:
    """What all ranks say, where all of them do the same now.

    Args:
        collectives: Of all ranks.
        doing: What this rank does with the network, as an error says it.
        facts: What this rank says.

    Raises:
        RankMismatchError: A rank does something else: one made a call that others did not make.
    """
    line = user_line() or "unknown line"
    message = {"doing": doing, "line": line, "facts": dict(facts)}
    found = collectives.all_gather_object(message)
    if len({each["doing"] for each in found}) > 1:
        said = [
            f"{each['doing']} at {each['line']}  {each['facts'].get('call', '')}" for each in found
        ]
        raise RankMismatchError(
            "the ranks do not make the same calls of the network",
            where=lines_by_rank(said, limit=200),
            hint="a network is called by all ranks or by none, an evaluation too, with tensors of\n"
            "the same shapes, in the same mode: take the call out of `if rank == 0`, and let one\n"
            "rank only print or save what came of it",
        )
    return [each["facts"] for each in found]


def lines_by_rank(said: Sequence[str], limit: int = 60) -> list[str]:
    """Which ranks say what, each answer once."""
    ranks: dict[str, list[int]] = {}
    for rank, answer in enumerate(said):
        ranks.setdefault(answer, []).append(rank)
    return [f"rank {', '.join(map(str, who))}: {answer[:limit]}" for answer, who in ranks.items()]


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """A checksum of values: equal for equal tensors, whatever holds them.

    Example:
        >>> a, b = {"x": torch.ones(3)}, {"x": torch.zeros(3)}
        >>> fingerprint(a) == fingerprint(dict(a)), fingerprint(a) == fingerprint(b)
        (True, False)
    """
    total = 0
    for path, tensor in tensors.items():
        data = plain(tensor).cpu().contiguous()
        header = f"{path} {tuple(data.shape)} {data.dtype}"
        total = zlib.crc32(header.encode(), total)
        if data.numel():
            total = zlib.crc32(data.reshape(-1).view(torch.uint8).numpy().tobytes(), total)
    return f"{total:08x}"
