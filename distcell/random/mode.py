"""The mode under which torch's random operations draw numbers that no split can change.

Every operation that would draw from torch's generator becomes a function of the key of the call,
the cell path, how many draws that cell has made in this call, and the element's global index:
`distcell::uniform` or `::keep_mask`, and arithmetic on them. What cannot be replaced is an error:
torch's own numbers would be others on every rank.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch

from distcell import compat, scope
from distcell.errors import CaptureError
from distcell.random.ops import keep_mask, uniform
from distcell.random.replacements import REPLACEMENTS

_PURE = {torch.ops.aten._fused_sdp_choice.default}
"""What torch marks as random, and draws nothing."""


@contextmanager
def random_mode(
    key: torch.Tensor, *, cell: Callable[[], str] = scope.current_cell
) -> Iterator[RandomMode]:
    """A context in which torch's random operations give the values of a key.

    It works in eager mode with autograd, and in a trace, where the key is an input. What
    `torch.utils.checkpoint` runs again in backward draws what it drew at first.

    Args:
        key: int64[3]: seed, step, micro-step (`RandomState.next_key`). Values are made on its
            device.
        cell: Tells the path of the cell that is running.

    Raises:
        CaptureError: In a random operation that has no replacement, or is given a generator.

    Example:
        >>> with random_mode(torch.tensor([0, 0, 0])):
        ...     first = torch.rand(3)
        >>> with random_mode(torch.tensor([0, 0, 0])):
        ...     torch.equal(first, torch.rand(3))
        True
    """
    with _entered(RandomMode(key, cell)) as mode:
        yield mode


class RandomMode(compat.TorchDispatchMode):
    """What `random_mode` enters: the key, and how many draws each cell has made.

    Args:
        key: As there.
        cell: As there.
        counts: How many draws each cell has made before.
    """

    def __init__(
        self, key: torch.Tensor, cell: Callable[[], str], counts: Counter[str] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.key = key
        self.cell = cell
        self.counts: Counter[str] = Counter(counts)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_random(func):
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            raise self.refuse(f"`{func}` is given a generator")
        if replacement := REPLACEMENTS.get(func):
            kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
            return replacement(self, *args, **kwargs)
        if func in _PURE or not _draws(compat.arguments(func, args, kwargs)):
            return func(*args, **kwargs)
        # In inference mode composite operations arrive whole.
        with self:
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            raise self.refuse(f"the random operation `{func}` has no replacement")
        return result

    def uniform(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device | None
    ) -> torch.Tensor:
        """Numbers in [0, 1), of the next stream."""
        if not dtype.is_floating_point:
            raise self.refuse(f"random numbers of type {dtype} have no replacement")
        numbers: torch.Tensor = uniform(self.key, self._next_stream(), list(shape), dtype=dtype)
        return numbers.to(device or "cpu")

    def keep_mask(self, p: float, shape: torch.Size, device: torch.device) -> torch.Tensor:
        """True with a probability, of the next stream."""
        if not 0 <= p <= 1:
            raise self.refuse(f"{p} is not a probability")
        mask: torch.Tensor = keep_mask(self.key, self._next_stream(), p, list(shape))
        return mask.to(device)

    def refuse(self, message: str) -> CaptureError:
        """The error of a draw that cannot be made."""
        cell = self.cell()
        return CaptureError(
            f"{message}, in {f'cell `{cell}`' if cell else 'the network'}",
            hint="draw it outside of the parallel Cell, and pass it in as an argument",
        )

    def _next_stream(self) -> int:
        path = self.cell()
        self.counts[path] += 1
        return stream_of(path, self.counts[path] - 1)


@lru_cache(maxsize=65536)
def stream_of(cell: str, ordinal: int) -> int:
    """The number of the stream of a draw, 63 bits.

    Args:
        cell: The path of the cell that draws.
        ordinal: How many draws the cell has made before in this call.

    Example:
        >>> stream_of("blocks.0.drop", 0) == stream_of("blocks.1.drop", 0)
        False
    """
    digest = hashlib.blake2b(f"{cell}\0{ordinal}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@lru_cache(maxsize=4096)
def _is_random(func: Any) -> bool:
    """Whether torch says that an operation draws. Kept, as asking takes longer than many run."""
    return torch.Tag.nondeterministic_seeded in func.tags


def _draws(arguments: dict[str, Any]) -> bool:
    """Whether an operation with these arguments draws: dropout of 0, or not in training, does not.

    Other random operations have no such arguments, or always draw.
    """
    if arguments.get("train", arguments.get("training")) is False:
        return False
    return all(arguments.get(name) != 0 for name in ("dropout_p", "dropout"))


@contextmanager
def _entered(mode: RandomMode) -> Iterator[RandomMode]:
    with compat.checkpoint_replayed(partial(_replay, mode)), mode:
        yield mode


def _replay(mode: RandomMode, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as it must run again: with the draws, and at the place, of this moment."""
    counts, resume = Counter(mode.counts), scope.save_place()

    def again(*args: Any, **kwargs: Any) -> Any:
        with resume(), _entered(RandomMode(mode.key, mode.cell, counts)):
            return function(*args, **kwargs)

    return again
