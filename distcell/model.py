"""The training loop of MindSpore: a network, a loss and an optimizer, trained on a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distcell.context import auto_parallel_context
from distcell.errors import DataError, UserTypeError
from distcell.nn.wrappers import Step, train_step
from distcell.parallel import parallelize

Metric = Callable[[Tensor, Tensor], Tensor | float]
"""Takes the network's output and the label of one batch."""


@dataclass(frozen=True)
class Progress:
    """What a callback is told.

    Args:
        epoch: counted from 1.
        step: counted from 1, over all epochs; 0 before the first.
        loss: of the last step; None before the first. Reading its value waits for the step.

    >>> Progress(epoch=1, step=0).loss is None
    True
    """

    epoch: int
    step: int
    loss: Tensor | None = None


class Callback:
    """What is called while a model trains; a subclass defines what it needs.

    >>> class Print(Callback):
    ...     def step_end(self, progress):
    ...         print(progress.step)
    """

    def epoch_begin(self, progress: Progress) -> None:
        """Called before the first step of each epoch."""

    def step_end(self, progress: Progress) -> None:
        """Called after each step."""

    def epoch_end(self, progress: Progress) -> None:
        """Called after the last step of each epoch."""


class Model:
    """A network with what trains it.

    The network becomes parallel, as by `parallelize`, unless the context says `stand_alone`.

    Args:
        network: a Cell or any torch module.
        loss_fn: takes the network's output and the label. None: the network's output is the loss.
        optimizer: a torch optimizer of the network's parameters; not needed to evaluate.
        metrics: by name, what `eval` reports besides the loss.

    >>> from distcell import nn
    >>> dc_model = Model(nn.Dense(2, 1), loss_fn=nn.MSELoss())
    >>> dc_model.network.is_auto_parallel
    True
    """

    def __init__(
        self,
        network: torch.nn.Module,
        loss_fn: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        self.loss_fn, self.optimizer, self.metrics = loss_fn, optimizer, dict(metrics or {})
        is_alone = auto_parallel_context().parallel_mode == "stand_alone"
        self.network = network if is_alone else parallelize(network)
        self._step: Step | None = None

    def train(
        self,
        epochs: int,
        dataset: Iterable[Any],
        callbacks: Callback | Sequence[Callback] = (),
    ) -> None:
        """Returns when the network has seen the data set `epochs` times.

        Args:
            epochs: how often.
            dataset: gives batches: tuples of the network's inputs and the label.
            callbacks: told of every step and epoch.

        Raises:
            UserTypeError: the model has no optimizer.
            DataError: an epoch gives no batch.

        >>> from distcell import nn
        >>> net = nn.Dense(1, 1)
        >>> data = [(torch.ones(1, 1), torch.ones(1, 1))]
        >>> Model(net, nn.MSELoss(), nn.SGD(net.trainable_params())).train(2, data)
        """
        step = self._train_step()
        told = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
        self.network.train()
        progress = Progress(epoch=0, step=0)
        for epoch in range(1, epochs + 1):
            before = progress = Progress(epoch, progress.step, progress.loss)
            for each in told:
                each.epoch_begin(progress)
            for batch in dataset:
                progress = Progress(epoch, progress.step + 1, step(*_items(batch)))
                for each in told:
                    each.step_end(progress)
            if progress is before:
                raise _no_batches(epoch)
            for each in told:
                each.epoch_end(progress)

    def eval(self, dataset: Iterable[Any]) -> dict[str, float]:
        """Returns the mean loss and metrics over a data set, each batch weighted by its size.

        Args:
            dataset: gives batches: tuples of the network's inputs and the label.

        Raises:
            DataError: the data set gives no batch.

        >>> from distcell import nn
        >>> net = torch.nn.Identity()
        >>> Model(net, nn.MSELoss()).eval([(torch.zeros(2), torch.ones(2))])
        {'loss': 1.0}
        """
        totals: dict[str, float] = {}
        count = 0
        with _evaluating(self.network), torch.no_grad():
            for batch in dataset:
                *inputs, label = _items(batch)
                size = len(label)
                output = self.network(*(inputs if self.loss_fn else [*inputs, label]))
                loss = self.loss_fn(output, label) if self.loss_fn else output
                values = {"loss": loss, **{n: m(output, label) for n, m in self.metrics.items()}}
                for name, value in values.items():
                    totals[name] = totals.get(name, 0.0) + float(value) * size
                count += size
        if not count:
            raise _no_batches(1)
        return {name: total / count for name, total in totals.items()}

    def predict(self, *inputs: Any) -> Any:
        """Returns the network's output, in evaluation mode and without gradients.

        Args:
            inputs: the network's inputs.

        >>> Model(torch.nn.Identity()).predict(torch.ones(1))
        tensor([1.])
        """
        with _evaluating(self.network), torch.no_grad():
            return self.network(*inputs)

    def _train_step(self) -> Step:
        if self.optimizer is None:
            raise UserTypeError("the model has no optimizer", hint="pass `optimizer=` to Model")
        if self._step is None:
            self._step = train_step(self.network, self.loss_fn, self.optimizer)
        return self._step


@contextmanager
def _evaluating(network: torch.nn.Module) -> Iterator[None]:
    # One flag for each module: a part that the user froze in evaluation mode stays so.
    before = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def _items(batch: Any) -> list[Any]:
    return list(batch) if isinstance(batch, tuple | list) else [batch]


def _no_batches(epoch: int) -> DataError:
    return DataError(
        f"the data set gave no batch in epoch {epoch}",
        hint="pass a list or a DataLoader; an iterator can be used once only",
    )
