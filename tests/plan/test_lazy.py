"""Parameters that are made late have the values that they would have had."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from distcell.errors import OptimizerStateError
from distcell.lazy import is_lazy, lazy_init, materialize


class Custom(nn.Module):
    """What initialisers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(80, 80))
        self.register_buffer("mask", torch.ones(80, 80).tril())
        self.table = torch.empty(80, 80)
        self.table.normal_()
        nn.init.normal_(self.weight, std=0.02)
        self.weight.data.mul_(3)
        self.row = self.weight[2, 1:].sum().item()
        with torch.no_grad():
            self.weight.detach().add_(1).clamp_(-1, 1)
        self.scale = self.weight.abs().mean().item()


NETS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(80, 80),
    "sequential": lambda: nn.Sequential(
        nn.Linear(80, 80), nn.Bilinear(8, 9, 80), nn.Linear(80, 99)
    ),
    "embedding": lambda: nn.Embedding(100, 64),
    "lstm": lambda: nn.LSTM(64, 64),
    "encoder layer": lambda: nn.TransformerEncoderLayer(64, 4),
    "custom": Custom,
    "again": lambda: nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 80)).apply(again),
}


def again(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_late_values_are_those_of_the_eager_network(name: str) -> None:
    torch.manual_seed(3)
    expected = NETS[name]()
    after = torch.rand(3)
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with lazy_init():
            net = NETS[name]()
    assert torch.equal(torch.rand(3), after)
    assert any(map(is_lazy, net.parameters()))
    state = torch.get_rng_state()
    for parameter in reversed(list(net.parameters())):
        kept = is_lazy(parameter)
        assert not kept or parameter.isnan().all()
        materialize(parameter)
        assert not is_lazy(parameter)
    assert torch.equal(torch.get_rng_state(), state)
    theirs = expected.state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in net.state_dict().items())
    if name == "custom":
        assert (net.scale, net.row) == (expected.scale, expected.row)
        assert torch.equal(net.table, expected.table)


def test_a_lazy_parameter_takes_no_memory() -> None:
    with lazy_init():
        net = nn.Linear(1000, 1000)
    assert net.weight.shape == (1000, 1000)
    assert net.weight.untyped_storage().nbytes() == 4


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64, padding_idx=0)
        self.scaled = nn.Parameter(torch.randn(80, 80) * 0.02)
        self.copied = nn.Linear(64, 64, bias=False)
        with torch.no_grad():
            self.copied.weight.copy_(torch.eye(64))
            rows = self.embedding.weight.data
            rows[1].fill_(1)
            rows[2].fill_(2)
        self.orthogonal = nn.Linear(64, 64)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.conv = nn.Conv2d(16, 32, 3)


def test_what_cannot_be_made_late_is_made_at_once_with_a_warning() -> None:
    torch.manual_seed(3)
    expected = Padded()
    torch.manual_seed(3)
    message = r"made 102,400 bytes of parameters at once.*Embedding\.weight"
    with pytest.warns(UserWarning, match=message), lazy_init():
        net = Padded()
    assert not any(map(is_lazy, net.parameters()))
    assert all(map(torch.equal, net.parameters(), expected.parameters()))


@pytest.mark.parametrize("write", [lambda p: p.data.zero_(), lambda p: nn.init.constant_(p, 2)])
def test_a_write_before_there_are_values_is_an_error(write: Callable[[nn.Parameter], None]) -> None:
    with lazy_init():
        net = nn.Linear(80, 80)
    with torch.no_grad():
        write(net.weight)
    with pytest.raises(OptimizerStateError, match=r"`Linear\.weight` was written to before"):
        materialize(net.weight)


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.mul_(2),
        lambda p: p.copy_(torch.ones(80, 80)),
        nn.init.normal_,
        nn.init.uniform_,
        lambda p: p.add_(torch.ones(80, 80)),
        lambda p: p.clamp_(0),
        lambda p: torch.optim.SGD([p], 0.1).step(),
    ],
)
def test_torch_refuses_other_writes(write: Callable[[nn.Parameter], None]) -> None:
    with lazy_init():
        net = nn.Linear(80, 80)
    net.weight.grad = torch.ones(80, 80)
    with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
        write(net.weight)


def test_modules_copied_while_they_are_built_are_whole() -> None:
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(64, 4)
    expected = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    torch.manual_seed(3)
    with lazy_init():
        layer = nn.TransformerEncoderLayer(64, 4)
        net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        more = copy.deepcopy(layer)
    materialize(*net.parameters())
    assert all(map(torch.equal, net.parameters(), expected.parameters()))
    assert all(map(torch.equal, more.parameters(), expected.layers[0].parameters()))


def test_nothing_changes_outside_of_the_context() -> None:
    with lazy_init():
        pass
    assert not any(map(is_lazy, nn.Linear(80, 80).parameters()))
