"""What generated programs call to exchange tensors between the ranks of a mesh."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from distcell.mesh import Mesh

Axes = tuple[str, ...]
ReduceKind = Literal["sum", "max", "min"]

_RING_LENGTH = 256


def payload_bytes(shape: Sequence[int], itemsize: int) -> int:
    """The bytes that a collective is counted with: those of the rank's own input tensor.

    The block that a rank gives to an all-gather, the whole local tensor of a reduce-scatter or an
    all-to-all, the sum over its tensors for `all_reduce_many`. The simulator counts with this
    function too, so its figures are those of the real run.

    Args:
        shape: The shape of the local input.
        itemsize: The bytes of one element.

    Example:
        >>> payload_bytes((8, 4), 4)
        128
    """
    return math.prod(shape) * itemsize


class LogEntry(NamedTuple):
    """One collective as a rank issued it: the `turn`-th over its axes, the `number`-th of all."""

    number: int
    kind: str
    axes: Axes
    bytes: int
    label: str
    started: float
    turn: int

    def __str__(self) -> str:
        over = f" over {','.join(self.axes)}" if self.axes else ""
        source = f"  {self.label}" if self.label else ""
        return f"#{self.number} {self.kind}{over}, {self.bytes} bytes{source}"


@dataclass
class CollectiveLog:
    """The collectives of one rank: the last ones in detail, all of them in the totals.

    `totals` maps (kind, axes) to (count, bytes) and is exact; `ring` holds the last entries.
    `pending` is the entry of the collective that has not returned yet, which the watchdog reads;
    `turns` says how many were issued over each axes: the members of a group issue the same ones.
    Barriers and the exchange of objects are in the ring, not in the totals: no program has them.

    Example:
        >>> log = CollectiveLog()
        >>> log.begin("all_reduce", ("dp",), 128)
        >>> log.end()
        >>> log.totals
        {('all_reduce', ('dp',)): (1, 128)}
    """

    ring: deque[LogEntry] = field(default_factory=lambda: deque(maxlen=_RING_LENGTH))
    totals: dict[tuple[str, Axes], tuple[int, int]] = field(default_factory=dict)
    pending: LogEntry | None = None
    number: int = 0
    turns: dict[Axes, int] = field(default_factory=dict)

    def begin(
        self, kind: str, axes: Axes, nbytes: int, label: str = "", *, counted: bool = True
    ) -> None:
        """Notes that a collective starts."""
        self.number += 1
        turn = self.turns[axes] = self.turns.get(axes, 0) + 1
        entry = LogEntry(self.number, kind, axes, nbytes, label, time.monotonic(), turn)
        self.ring.append(entry)
        if counted:
            count, total = self.totals.get((kind, axes), (0, 0))
            self.totals[kind, axes] = (count + 1, total + nbytes)
        self.pending = entry

    def end(self) -> None:
        """Notes that the collective that started last has finished."""
        self.pending = None

    def last(self) -> LogEntry | None:
        """The entry that was added last, finished or not."""
        return self.ring[-1] if self.ring else None

    def clear(self) -> None:
        """Forgets the totals, as before a step that is to be counted alone."""
        self.totals.clear()


class Collectives(Protocol):
    """The exchange of tensors between the ranks of a mesh, as one rank sees it.

    A group is named by axes of the mesh: the ranks that differ along these axes only, in row-major
    order of the axes as listed. No result aliases an input, but where `inplace` is given. `label`
    says where the collective comes from (cell path, file:line); it is kept in the log.
    """

    @property
    def mesh(self) -> Mesh:
        """The ranks that take part."""
        ...

    @property
    def rank(self) -> int:
        """The place of this rank in the mesh."""
        ...

    @property
    def log(self) -> CollectiveLog:
        """What was exchanged."""
        ...

    def all_reduce(
        self,
        x: Tensor,
        axes: Axes,
        op: ReduceKind = "sum",
        *,
        inplace: bool = False,
        label: str = "",
    ) -> Tensor:
        """The sum (max, min) of the members' tensors, on each of them.

        Args:
            x: The local tensor; of the same shape and dtype on every member.
            axes: The axes of the group.
            op: `sum`, `max` or `min`. NaN wins in max and min, as it does in torch. For bool the
                sum is the logical or.
            inplace: Reduce into `x` and return it.
            label: Where the collective comes from.
        """
        ...

    def all_gather(
        self, x: Tensor, axes: Axes, dim: int, sizes: Sequence[int], *, label: str = ""
    ) -> Tensor:
        """The members' tensors, joined along a dim; contiguous.

        Args:
            x: The local block.
            axes: The axes of the group.
            dim: The dim to join along; negative counts from the end.
            sizes: The extent of each member's block along `dim`; uneven and zero allowed.
            label: Where the collective comes from.
        """
        ...

    def reduce_scatter(
        self,
        x: Tensor,
        axes: Axes,
        dim: int,
        sizes: Sequence[int],
        op: ReduceKind = "sum",
        *,
        label: str = "",
    ) -> Tensor:
        """This member's slice, along `dim`, of the sum (max, min) of the members' tensors.

        Args:
            x: The local tensor, of the same shape on every member.
            axes: The axes of the group.
            dim: The dim that is split.
            sizes: The extent of each member's slice.
            op: `sum`, `max` or `min`.
            label: Where the collective comes from.
        """
        ...

    def all_to_all(  # noqa: PLR0917
        self,
        x: Tensor,
        axes: Axes,
        split_dim: int,
        concat_dim: int,
        split_sizes: Sequence[int],
        concat_sizes: Sequence[int],
        *,
        label: str = "",
    ) -> Tensor:
        """Slice i of the local tensor goes to member i; the received ones are joined.

        Args:
            x: The local tensor.
            axes: The axes of the group.
            split_dim: The dim that is cut.
            concat_dim: The dim that the received slices are joined along.
            split_sizes: The extents of the slices along `split_dim`.
            concat_sizes: The extent along `concat_dim` of what comes from each member.
            label: Where the collective comes from.
        """
        ...

    def permute(
        self,
        x: Tensor,
        axes: Axes,
        source: int | None,
        target: int | None,
        shape: Sequence[int],
        *,
        label: str = "",
    ) -> Tensor:
        """The tensor of member `source`, while the local one goes to member `target`.

        Args:
            x: The local tensor.
            axes: The axes of the group.
            source: The member to receive from; None receives nothing and returns zeros.
            target: The member to send to; None sends nothing.
            shape: The shape of what arrives.
            label: Where the collective comes from.
        """
        ...

    def broadcast(self, x: Tensor, axes: Axes, root: int, *, label: str = "") -> Tensor:
        """The tensor of member `root`, on every member.

        Args:
            x: The local tensor; its shape and dtype are those of the root's.
            axes: The axes of the group.
            root: The member whose values all get.
            label: Where the collective comes from.
        """
        ...

    def all_reduce_many(
        self, xs: Sequence[Tensor], axes: Axes, op: ReduceKind = "sum", *, label: str = ""
    ) -> list[Tensor]:
        """The reduced tensors, exchanged as one message.

        They are views of a buffer that stays from step to step, and are valid until the next call
        with the same shapes, axes, op and label.

        Args:
            xs: Local tensors of one dtype.
            axes: The axes of the group.
            op: `sum`, `max` or `min`.
            label: Where the collective comes from.
        """
        ...

    def lend_many(
        self, xs: Sequence[Tensor], axes: Axes, op: ReduceKind = "sum", *, label: str = ""
    ) -> list[Tensor]:
        """The views that `all_reduce_many` reduces in: what is computed into them is not copied.

        Collective: every member must call it. What lies in them is lost with the next
        `all_reduce_many` of the same shapes, axes, op and label.

        Args:
            xs: Tensors of the shapes, the dtype and the device; their values do not matter.
            axes: The axes of the group.
            op: `sum`, `max` or `min`.
            label: Where the collective comes from.
        """
        ...

    def barrier(self) -> None:
        """Returns when every rank of the mesh has called it."""
        ...

    def all_gather_object(self, obj: Any) -> list[Any]:
        """The JSON values of all ranks of the mesh, in their order.

        Args:
            obj: What `json.dumps` accepts.
        """
        ...
