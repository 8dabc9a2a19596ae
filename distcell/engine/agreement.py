"""What all ranks must agree on before a program runs.

It is compared, so that a difference is an error that says what differs, not a hang.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

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
        RankMismatchError: When anything else does.
    """
    found: Sequence[Mapping[str, str]] = collectives.all_gather_object(dict(facts))
    for subject in facts:
        said = [each.get(subject, "nothing") for each in found]
        if len(set(said)) == 1:
            continue
        kind = DataError if subject == "inputs" else RankMismatchError
        raise kind(
            f"the ranks differ in: {subject}", where=lines_by_rank(said), hint=_HINTS.get(subject)
        )


def lines_by_rank(said: Sequence[str]) -> list[str]:
    """Which ranks say what, each answer once."""
    ranks: dict[str, list[int]] = {}
    for rank, answer in enumerate(said):
        ranks.setdefault(answer, []).append(rank)
    return [f"rank {', '.join(map(str, who))}: {answer[:60]}" for answer, who in ranks.items()]


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
