"""Whole steps: `WithLossCell`, `TrainOneStepCell` and `Model` on one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import distcell as dc
from distcell import nn
from distcell.cell import Cell
from distcell.errors import DataError, UserTypeError
from distcell.model import Callback, Progress

BATCHES = [(torch.randn(5, 3), torch.randn(5, 2)) for _ in range(3)]


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.relu, self.down = nn.Dense(3, 4), nn.ReLU(), nn.Dense(4, 2)

    def construct(self, x: Tensor) -> Tensor:
        return self.down(self.relu(self.up(x)))


def by_hand(net: torch.nn.Module, epochs: int) -> list[float]:
    """The same training in plain torch; changes the net."""
    net = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in BATCHES * epochs:
        loss = torch.nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(autouse=True)
def _defaults() -> Any:
    torch.manual_seed(0)
    yield
    dc.reset_auto_parallel_context()


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.events: list[tuple[str, int, int]] = []

    def epoch_begin(self, progress: Progress) -> None:
        self.events.append(("begin", progress.epoch, progress.step))

    def step_end(self, progress: Progress) -> None:
        assert progress.loss is not None
        self.losses.append(progress.loss.item())

    def epoch_end(self, progress: Progress) -> None:
        self.events.append(("end", progress.epoch, progress.step))


def test_a_model_trains_as_the_loop_by_hand() -> None:
    net, told = Net(), Losses()
    wanted = by_hand(net, 2)
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    model = dc.Model(net, loss_fn=nn.MSELoss(), optimizer=optimizer)
    model.train(2, BATCHES, callbacks=told)
    assert told.losses == pytest.approx(wanted, rel=1e-6)
    assert told.events == [("begin", 1, 0), ("end", 1, 3), ("begin", 2, 3), ("end", 2, 6)]
    assert net.training


def test_a_train_one_step_cell_trains_as_the_loop_by_hand() -> None:
    net = Net()
    wanted = by_hand(net, 1)
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)
    assert [step(x, y).item() for x, y in BATCHES] == pytest.approx(wanted, rel=1e-6)
    assert next(p.name for p in step.trainable_params()) == "up.weight"


def test_a_parallel_train_one_step_cell_trains_as_the_loop_by_hand() -> None:
    net = Net().set_auto_parallel()
    wanted = by_hand(Net.set_auto_parallel(copy.deepcopy(net), False), 1)
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)
    assert [step(x, y).item() for x, y in BATCHES] == pytest.approx(wanted, rel=1e-6)


def test_a_network_whose_output_is_the_loss_needs_no_loss() -> None:
    class Loss(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def construct(self, x: Tensor, y: Tensor) -> Tensor:
            return (self.net(x) - y).square().mean()

    net, told = Loss(), Losses()
    wanted = by_hand(net.net, 1)
    model = dc.Model(net, optimizer=nn.Momentum(net.trainable_params(), 0.1, 0.9))
    model.train(1, BATCHES, told)
    assert told.losses == pytest.approx(wanted, rel=1e-6)
    after = [torch.nn.functional.mse_loss(net.net(x), y).item() for x, y in BATCHES]
    assert model.eval(BATCHES)["loss"] == pytest.approx(sum(after) / len(after), rel=1e-6)


def test_eval_weighs_batches_by_their_size_and_leaves_modes_as_they_were() -> None:
    net = Net()
    net.relu.eval()
    x, y = torch.randn(7, 3), torch.randn(7, 2)
    model = dc.Model(net, nn.MSELoss(), metrics={"bias": lambda out, label: (out - label).mean()})
    found = model.eval([(x[:5], y[:5]), (x[5:], y[5:])])
    out = net(x)
    assert found["loss"] == pytest.approx(torch.nn.functional.mse_loss(out, y).item(), rel=1e-6)
    assert found["bias"] == pytest.approx((out - y).mean().item(), rel=1e-5)
    assert (net.training, net.relu.training) == (True, False)


def test_predict_runs_in_evaluation_mode_without_gradients() -> None:
    net = nn.SequentialCell(nn.Dense(3, 3), nn.Dropout(p=0.5))
    x = torch.randn(2, 3)
    out = dc.Model(net).predict(x)
    assert torch.equal(out, net[0](x))
    assert not out.requires_grad
    assert net.training


def test_a_model_makes_its_network_parallel_unless_it_stands_alone() -> None:
    assert isinstance(dc.Model(torch.nn.Linear(1, 1)).network, Cell)
    dc.set_auto_parallel_context(parallel_mode="stand_alone")
    assert not isinstance(dc.Model(torch.nn.Linear(1, 1)).network, Cell)


def test_what_cannot_be_trained_is_an_error() -> None:
    net = Net()
    with pytest.raises(UserTypeError, match="the model has no optimizer"):
        dc.Model(net, nn.MSELoss()).train(1, BATCHES)
    model = dc.Model(net, nn.MSELoss(), nn.SGD(net.trainable_params()))
    with pytest.raises(DataError, match="no batch in epoch 2") as raised:
        model.train(2, iter(BATCHES))
    assert raised.value.hint is not None
    with pytest.raises(DataError, match="no batch"):
        model.eval([])
