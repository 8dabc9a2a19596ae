"""What a user may do wrong, or change, between two calls: one clear error, or a right result."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path
from weakref import WeakSet

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import distcell as dc
import distcell.random
from distcell.context import LaunchOptions
from distcell.engine import state
from distcell.errors import CaptureError, DistcellError, StrategyError, UserTypeError
from distcell.simulate.values import SimulatedRanks
from tests.training import launched, logs_of, simulated

F64 = torch.float64
HERE = Path(__file__).name


class Inner(nn.Module):
    """The cell in which something goes wrong."""

    def __init__(self, does: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.does, self.calls, self.scale = does, 0, 2.0
        self.sizes = [1, 2]

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, x)


class Net(nn.Module):
    """A layer, dropout, and the cell in which something goes wrong."""

    def __init__(self, does: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 6)
        self.inner = Inner(does)

    def forward(self, x: Tensor, *, twice: bool = False) -> Tensor:
        y = self.down(self.drop(F.relu(self.up(x))))
        y = self.inner(y)
        return y.pow(2).mean() * (2 if twice else 1)


def batch(rows: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed), dtype=F64)


def parallel(does: Callable[[nn.Module, Tensor], Tensor]) -> Net:
    torch.manual_seed(0)
    distcell.random.seed(0)
    return dc.parallelize(Net(does).to(F64))


# - What a captured call cannot say


def branches(cell: nn.Module, x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x
    return -x


def reads_a_value(cell: nn.Module, x: Tensor) -> Tensor:
    return x * x.sum().item()


def counts_calls(cell: nn.Module, x: Tensor) -> Tensor:
    cell.calls += 1
    return x * cell.calls


def appends(cell: nn.Module, x: Tensor) -> Tensor:
    cell.sizes.append(3)
    return x


def keeps_a_tensor(cell: nn.Module, x: Tensor) -> Tensor:
    cell.last = x
    return x


def rolls_dice(cell: nn.Module, x: Tensor) -> Tensor:
    return x * random.choice([1, 2, 3])


def rolls_dice_of_numpy(cell: nn.Module, x: Tensor) -> Tensor:
    return x * float(np.random.rand())


CALLS_REFUSED = [
    (branches, "cell `inner` needs the value of a tensor", f"{HERE}:", "torch.where"),
    (reads_a_value, "cell `inner` needs the value of a tensor", f"{HERE}:", "outside of the call"),
    (counts_calls, "the call changes the attribute `inner.calls`", "from 0 to 1", "outside of"),
    (appends, "the call changes the attribute `inner.sizes`", "[1, 2, 3]", "outside of"),
    (keeps_a_tensor, "keeps a tensor in the attribute `inner.last`", "", "buffer"),
    (rolls_dice, "cell `inner` draws a number with Python's `random`", "", "outside of the call"),
    (rolls_dice_of_numpy, "draws a number with Python's `numpy.random`", "", "outside of the call"),
]


@pytest.mark.parametrize(("does", "what", "where", "hint"), CALLS_REFUSED)
def test_a_call_that_cannot_be_captured_is_refused_and_changes_nothing(
    does: Callable[[nn.Module, Tensor], Tensor], what: str, where: str, hint: str
) -> None:
    net = parallel(does)
    weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    with launched(simulated(4, "data")):
        with pytest.raises(CaptureError) as caught:
            net(batch())
        assert what in caught.value.message
        assert where in str(caught.value)
        assert hint in (caught.value.hint or "")
        assert (net.inner.calls, net.inner.scale) == (0, 2.0)
        assert not hasattr(net.inner, "last")
        assert all(torch.equal(p, weights[name]) for name, p in net.named_parameters())
        # and it can go on
        net.inner.does = lambda cell, x: x
        assert net(batch()).isfinite()


def test_the_line_of_a_branch_is_the_users() -> None:
    line = branches.__code__.co_firstlineno + 1
    with launched(simulated(2, "data")), pytest.raises(CaptureError, match=f"{HERE}:{line} "):
        parallel(branches)(batch())


def test_a_branch_in_construct_of_a_cell_names_the_cell() -> None:
    class Branching(dc.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return x if bool(x.max() > 0) else -x

    class Outer(dc.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.branching = dc.nn.Dense(6, 6), Branching()

        def construct(self, x: Tensor) -> Tensor:
            return self.branching(self.dense(x)).sum()

    net = Outer().set_auto_parallel()
    with launched(simulated(2, "data")), pytest.raises(CaptureError, match="cell `branching`"):
        net(torch.ones(4, 6))


def test_an_error_of_the_users_own_code_stays_what_it_is() -> None:
    net = parallel(lambda cell, x: x @ torch.ones(5, 5, dtype=F64))  # needs [6, _]
    with (
        launched(simulated(2, "data")),
        pytest.raises(RuntimeError, match="reduction dim") as caught,
    ):
        net(batch())
    assert not isinstance(caught.value, DistcellError)


# - What may change between calls


def run(what: Callable[[Net], list[Tensor]], options: LaunchOptions) -> list[Tensor]:
    with launched(options):
        return what(parallel(lambda cell, x: x * cell.scale))


def step(net: Net, x: Tensor, **kwargs: bool) -> list[Tensor]:
    """The loss of a call and its gradients, and a step downhill."""
    loss = net(x, **kwargs)
    loss.backward()
    grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    net.zero_grad()
    return [loss.detach(), *grads]


def another_shape(net: Net) -> list[Tensor]:
    return [y for rows in (8, 5, 8, 3, 1) for y in step(net, batch(rows))]


def evaluation(net: Net) -> list[Tensor]:
    found = step(net, batch())
    net.eval()
    with torch.no_grad():
        found += [net(batch()), net(batch())]
    found += step(net, batch())
    net.train()
    return found + step(net, batch())


def part_in_evaluation(net: Net) -> list[Tensor]:
    found = step(net, batch())
    net.drop.eval()
    return found + step(net, batch())


def a_scalar_attribute(net: Net) -> list[Tensor]:
    found = step(net, batch())
    net.inner.scale = 3.0
    found += step(net, batch())
    net.drop.p = 0.6
    found += step(net, batch())
    net.inner.scale, net.drop.p = 2.0, 0.3
    return found + step(net, batch())


def an_attribute_that_is_a_function(net: Net) -> list[Tensor]:
    found = step(net, batch())
    net.inner.does = lambda cell, x: x.tanh()
    return found + step(net, batch())


def an_argument(net: Net) -> list[Tensor]:
    return step(net, batch()) + step(net, batch(), twice=True) + step(net, batch(), twice=False)


def frozen_parameters(net: Net) -> list[Tensor]:
    found = step(net, batch())
    net.up.requires_grad_(False)
    found += step(net, batch())
    net.up.requires_grad_(True)
    return found + step(net, batch())


def an_input_with_a_gradient(net: Net) -> list[Tensor]:
    found = step(net, batch())
    x = batch().requires_grad_()
    net(x).backward()
    net.zero_grad()
    assert x.grad is not None
    return [*found, x.grad]


def a_child_replaced(net: Net) -> list[Tensor]:
    found = step(net, batch())
    net.drop = nn.Identity()
    return found + step(net, batch())


def weights_loaded(net: Net) -> list[Tensor]:
    found = step(net, batch())
    net.load_state_dict({name: value * 0.5 for name, value in net.state_dict().items()})
    return found + step(net, batch())


def two_calls_one_backward(net: Net) -> list[Tensor]:
    loss = net(batch()) + net(batch(6, seed=1))
    loss.backward()
    return [loss.detach(), *[p.grad for p in net.parameters() if p.grad is not None]]


CHANGES = [
    another_shape,
    evaluation,
    part_in_evaluation,
    a_scalar_attribute,
    an_attribute_that_is_a_function,
    an_argument,
    frozen_parameters,
    an_input_with_a_gradient,
    a_child_replaced,
    weights_loaded,
    two_calls_one_backward,
]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["data", "tensor", "data-tensor"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_calls_counts(
    change: Callable[[Net], list[Tensor]], strategy: str
) -> None:
    wanted = run(change, LaunchOptions())
    found = run(change, simulated(4, strategy))
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_programs_that_are_not_kept_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MAX_CALLS", 2)
    loaded: WeakSet[SimulatedRanks] = WeakSet()
    load = SimulatedRanks.__init__

    def noted(self: SimulatedRanks, *args: object, **kwargs: object) -> None:
        loaded.add(self)
        load(self, *args, **kwargs)

    monkeypatch.setattr(SimulatedRanks, "__init__", noted)
    net = parallel(lambda cell, x: x)
    with launched(simulated(2, "data")):
        for rows in range(1, 7):
            net(batch(rows)).backward()
        gc.collect()
        assert len(loaded) == 2 * 2  # forward and backward
        counts = sum(count for count, _ in logs_of(net)[0].totals.values())
        net(batch(6)).backward()
        # what evicted programs have exchanged still counts
        assert 0 < sum(c for c, _ in logs_of(net)[0].totals.values()) - counts < counts


# - What the call is given


def test_an_argument_too_many_is_pythons_error() -> None:
    net = parallel(lambda cell, x: x)
    with launched(simulated(2, "data")), pytest.raises(TypeError, match="argument"):
        net(batch(), batch(), batch())


def test_a_misspelt_argument_is_pythons_error() -> None:
    net = parallel(lambda cell, x: x)
    with launched(simulated(2, "data")), pytest.raises(TypeError, match="twise"):
        net(batch(), twise=True)


def test_a_batch_without_rows_is_that_of_one_device() -> None:
    wanted = run(lambda net: [net(batch(0))], LaunchOptions())
    found = run(lambda net: [net(batch(0))], simulated(2, "data"))
    assert found[0].isnan().item() and wanted[0].isnan().item()


def test_an_unknown_strategy_is_told_the_known_ones() -> None:
    net = parallel(lambda cell, x: x)
    with launched(simulated(2, "tensr")), pytest.raises(StrategyError) as caught:
        net(batch())
    assert "tensr" in caught.value.message
    assert "tensor" in (caught.value.hint or "")


def test_what_is_no_module_cannot_be_made_parallel() -> None:
    with pytest.raises(UserTypeError, match="a list cannot be made parallel"):
        dc.parallelize([1])


def test_a_strategy_that_does_not_fit_leaves_the_network_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text('distcell: 1\nmesh: {tp: -1}\ncells: {"**.upp": {params: {weight: [tp]}}}\n')
    net = parallel(lambda cell, x: x * cell.scale)
    with launched(simulated(2, str(path))):
        for _ in range(2):  # the second time it is the same error
            with pytest.raises(StrategyError, match="matches no cell"):
                net(batch())
    with launched(simulated(2, "tensor")):
        found = net(batch())
    wanted = run(lambda net: [net(batch())], LaunchOptions())
    torch.testing.assert_close(found, wanted[0])
