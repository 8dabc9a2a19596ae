"""Cells that add a loss, and a whole training step, to a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from distcell.cell import Cell
from distcell.errors import DataError, UserTypeError, UserValueError
from distcell.parallel import parallelize

Step = Callable[..., Tensor]
"""A training step: takes a batch, changes the weights, returns the loss before the change."""


class WithLossCell(Cell):
    """The loss of a network: takes the network's inputs, then the label.

    Args:
        backbone: the network.
        loss_fn: takes the network's output and the label.

    >>> net = WithLossCell(torch.nn.Identity(), torch.nn.MSELoss())
    >>> net(torch.zeros(2), torch.ones(2))
    tensor(1.)
    """

    def __init__(self, backbone: torch.nn.Module, loss_fn: torch.nn.Module) -> None:
        super().__init__(auto_prefix=False)
        self.backbone, self.loss_fn = backbone, loss_fn

    def construct(self, *batch: Any) -> Any:
        """Returns the loss."""
        *inputs, label = batch
        return self.loss_fn(self.backbone(*inputs), label)


class PipelineCell(Cell):
    """A network that takes its batch in parts: the sum of what it returns for them.

    Args:
        network: returns the loss of a batch.
        micro_size: the number of parts, in order, along dim 0 of every tensor.

    Raises:
        UserTypeError: the network is no module, or the number no int.
        UserValueError: the number is less than 1.

    >>> net = PipelineCell(WithLossCell(torch.nn.Identity(), torch.nn.MSELoss()), 2)
    >>> net(torch.zeros(4), torch.ones(4))
    tensor(2.)
    """

    def __init__(self, network: torch.nn.Module, micro_size: int) -> None:
        super().__init__(auto_prefix=False)
        if not isinstance(network, torch.nn.Module):
            raise UserTypeError(f"`network` is a {type(network).__name__}, not a Cell")
        if isinstance(micro_size, bool) or not isinstance(micro_size, int):
            raise UserTypeError(f"`micro_size` is {micro_size!r}, not an int")
        if micro_size < 1:
            raise UserValueError(f"`micro_size` is {micro_size}; a batch has at least 1 part")
        self.network, self.micro_size = network, micro_size

    def construct(self, *batch: Tensor) -> Tensor:
        """Returns the sum over the parts.

        Raises:
            DataError: a batch does not divide.
        """
        for place, tensor in enumerate(batch):
            if tensor.shape[0] % self.micro_size:
                raise DataError(
                    f"input {place} has {tensor.shape[0]} rows, which do not divide by "
                    f"micro_size={self.micro_size}"
                )
        parts = zip(*(tensor.chunk(self.micro_size) for tensor in batch), strict=True)
        first, *rest = [self.network(*part) for part in parts]
        total: Tensor = sum(rest, start=first)
        return total


class TrainOneStepCell(Cell):
    """A whole training step: forward, loss, backward and optimizer in one program.

    Args:
        network: returns the loss: a `WithLossCell`, or a network whose output is the loss.
        optimizer: a torch optimizer of the network's parameters.

    >>> net = WithLossCell(torch.nn.Linear(1, 1), torch.nn.MSELoss())
    >>> step = TrainOneStepCell(net, torch.optim.SGD(net.parameters(), 0.1))
    >>> bool(step(torch.ones(1, 1), torch.ones(1, 1)) > step(torch.ones(1, 1), torch.ones(1, 1)))
    True
    """

    def __init__(self, network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(auto_prefix=False)
        self.network, self.optimizer = network, optimizer
        self._step: Step | None = None

    def set_auto_parallel(self, mode: bool = True) -> Self:
        """Returns this cell, whose network is now parallel.

        The step itself is no call of a network: what it trains goes through the engine.

        Args:
            mode: False makes the network a plain module again.

        >>> net = WithLossCell(Cell(), torch.nn.MSELoss())
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> step = TrainOneStepCell(net, torch.optim.SGD([weight], 0.1)).set_auto_parallel()
        >>> net.backbone.is_auto_parallel
        True
        """
        trained, _ = self._trained()
        if mode or isinstance(trained, Cell):
            parallelize(trained).set_auto_parallel(mode)
        self._step = None
        return self

    def construct(self, *batch: Any) -> Tensor:
        """Returns the loss before the step."""
        if self._step is None:  # made late: the network may become parallel after this cell is made
            trained, loss_fn = self._trained()
            if isinstance(self.network, Cell) and self.network.is_auto_parallel:
                trained = parallelize(trained)
            self._step = train_step(trained, loss_fn, self.optimizer)
        return self._step(*batch)

    def _trained(self) -> tuple[Any, torch.nn.Module | None]:
        """The network that is trained, and the loss function that stands outside of it."""
        if isinstance(self.network, WithLossCell):
            return self.network.backbone, self.network.loss_fn
        return self.network, None


def train_step(
    net: torch.nn.Module, loss_fn: torch.nn.Module | None, optimizer: torch.optim.Optimizer
) -> Step:
    """Returns a training step of a network: one program when the network is parallel.

    Args:
        net: takes the batch but the label; without `loss_fn`, it takes all of it.
        loss_fn: takes the network's output and the label; None: the network's output is the loss.
        optimizer: a torch optimizer of the network's parameters.

    >>> net = torch.nn.Linear(1, 1)
    >>> step = train_step(net, torch.nn.MSELoss(), torch.optim.SGD(net.parameters(), 0.1))
    >>> step(torch.ones(1, 1), torch.ones(1, 1)).shape
    torch.Size([])
    """
    if isinstance(net, Cell) and net.is_auto_parallel:
        from distcell.engine import compile_step  # heavy; late, as in `Cell.__call__`

        return compile_step(net, loss_fn, optimizer)

    def step(*batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(*batch) if loss_fn is None else loss_fn(net(*batch[:-1]), batch[-1])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
