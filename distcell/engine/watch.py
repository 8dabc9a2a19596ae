"""Whether ranks go on to agree after the first call: on their data, and on their random numbers.

Each rank keeps a checksum of what it was given and of the key that it draws random numbers from,
and from time to time the ranks compare theirs. An order of the data that differs from the second
epoch on, or a seed that a rank sets for itself, is an error some calls later, not a training on
other data, or under other dropout, than the user thinks.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from distcell.engine.agreement import SAME_BATCH, exchange, lines_by_rank
from distcell.errors import DataError, DistcellError, RankMismatchError
from distcell.piece import plain
from distcell.runtime.collectives import Collectives

EVERY = 32
"""After how many calls the ranks compare; they do so after 1, 2, 4, 8 and 16 too."""

_SAMPLE = 1024
"""How many elements of a tensor are looked at in one call: others in each."""

_KEY = " key"  # no path of an argument has a blank


class Watch:
    """Compares what the ranks compute with, call by call, without an exchange in each.

    What was given in a call counts at the next comparison, so nothing on the CPU escapes. A tensor
    on another device is looked at in the calls that compare: to look is to wait for the device.
    """

    def __init__(self) -> None:
        self.calls, self.compared = 0, 0
        self.sums: dict[str, int] = {}

    def saw(self, leaves: Mapping[str, Tensor], key: Tensor, collectives: Collectives) -> None:
        """Notes a call. Every rank must call this.

        Args:
            leaves: By path, the tensors that must be alike on all ranks.
            key: What the random numbers of the call are made from.
            collectives: Of all ranks.

        Raises:
            DataError: Ranks were given other data since the comparison before.
            RankMismatchError: Their keys differ.
        """
        self.calls += 1
        compares = self.calls % EVERY == 0 or self.calls in (1, 2, 4, 8, 16)
        for path, tensor in (*leaves.items(), (_KEY, key)):
            if compares or tensor.device.type == "cpu":
                self.sums[path] = _checksum(tensor, self.calls, self.sums.get(path, 0))
        if compares:
            self._compare(collectives)
            self.compared = self.calls

    def _compare(self, collectives: Collectives) -> None:
        found = exchange(collectives, "calls the network as before", self.sums)
        paths = dict.fromkeys(path for each in found for path in each)
        different = [path for path in paths if len({each.get(path) for each in found}) > 1]
        if different:
            first = self.compared + 1
            when = f"call {first}" if first == self.calls else f"calls {first} to {self.calls}"
            raise _error(different, found, when)


def _error(different: list[str], found: list[Mapping[str, int]], when: str) -> DistcellError:
    if different == [_KEY]:
        return RankMismatchError(
            f"the ranks draw different random numbers in {when}",
            where=lines_by_rank([f"{each.get(_KEY, 0):08x}" for each in found]),
            hint="seed all ranks alike with `torch.manual_seed`, later too, and step the same "
            "optimizers on all of them: the step is part of what a number is made from",
        )
    shown = [path for path in different if path != _KEY][:3]
    said = [", ".join(f"{path} {each.get(path, 0):08x}" for path in shown) for each in found]
    return DataError(
        f"the ranks were given different data: `{shown[0]}` in {when}",
        where=[*lines_by_rank(said), "checksums of what each rank passed to the network"],
        hint=SAME_BATCH,
    )


def _checksum(tensor: Tensor, call: int, before: int) -> int:
    """The checksum of some elements, which goes on from the one before."""
    flat = plain(tensor).reshape(-1)
    # odd: it goes through all columns of rows of the usual lengths
    step = max(1, flat.numel() // _SAMPLE) | 1
    some = flat[call % step :: step].cpu().contiguous()
    header = f"{tuple(tensor.shape)} {tensor.dtype}"
    total = zlib.crc32(header.encode(), before)
    return zlib.crc32(some.view(torch.uint8).numpy().tobytes(), total) if some.numel() else total
