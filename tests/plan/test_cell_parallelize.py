"""`parallelize`: a module of others made parallel in place."""

from __future__ import annotations

import copy
import io
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distcell as dc
from distcell.cell import Cell, call_signature, inside_engine
from distcell.errors import UserTypeError
from distcell.parallel import parallelize


class Net(nn.Module):
    """A network of someone else."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.config = nn.Linear(2, 2), SimpleNamespace(use_cache=True, width=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)

    def generate(self) -> str:
        return "text"


class OwnState(nn.Linear):
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "saved": True}


class OwnCall(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return x


def quiet() -> Net:
    net = Net()
    net.config.use_cache = False
    return net


def test_it_returns_the_same_object_with_the_same_parameters() -> None:
    net = quiet()
    weight, keys = net.up.weight, list(net.state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert parallelize(net) is net
    assert net.up.weight is weight
    assert optimizer.param_groups[0]["params"][0] is weight
    assert list(net.state_dict()) == keys
    assert weight.name == "up.weight"


def test_the_class_is_a_subclass_of_its_own_and_of_cell() -> None:
    net = parallelize(quiet())
    assert isinstance(net, Net)
    assert isinstance(net, Cell)
    assert net.is_auto_parallel
    assert (type(net).__name__, type(net).__module__) == ("Net", Net.__module__)
    assert type(net).__doc__ == "A network of someone else."
    assert net.generate() == "text"
    assert net.config.width == 2
    assert repr(net) == repr(quiet())
    assert list(call_signature(net).parameters) == ["x"]


def test_two_modules_of_one_class_get_one_class() -> None:
    assert type(parallelize(quiet())) is type(parallelize(quiet()))


def test_a_second_call_changes_nothing() -> None:
    net = parallelize(quiet())
    kind = type(net)
    assert parallelize(net) is net
    assert type(net) is kind


def test_a_cell_keeps_its_class() -> None:
    net = dc.nn.Dense(2, 2)
    assert type(parallelize(net)) is dc.nn.Dense
    assert net.is_auto_parallel


def test_hooks_survive() -> None:
    net, seen = quiet(), []
    net.register_forward_hook(lambda module, args, out: seen.append(module))
    net.up.register_forward_hook(lambda module, args, out: seen.append(module))
    parallelize(net)(torch.ones(1, 2))
    assert seen == [net.up, net]


def test_the_cache_of_a_hugging_face_model_is_turned_off_with_a_warning() -> None:
    net = Net()
    with pytest.warns(UserWarning, match=r"sets `config\.use_cache = False` on this Net") as caught:
        parallelize(net)
    assert net.config.use_cache is False
    assert caught[0].filename == __file__


@pytest.mark.parametrize("make", [quiet, lambda: OwnState(2, 2)])
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_parallel_and_equal(make: Any, way: str) -> None:
    net = parallelize(make())
    if way == "deepcopy":
        twin = copy.deepcopy(net)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(net))
    else:
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert type(twin) is type(net)
    assert twin.is_auto_parallel
    assert twin.state_dict().keys() == net.state_dict().keys()
    x = torch.ones(1, 2)
    with inside_engine():
        assert torch.equal(twin(x), net(x))
    assert all(a is not b for a, b in zip(twin.parameters(), net.parameters(), strict=True))


def test_a_state_dict_of_the_plain_module_loads() -> None:
    plain, net = quiet(), parallelize(quiet())
    net.load_state_dict(plain.state_dict())
    assert torch.equal(net.up.weight, plain.up.weight)
    plain.load_state_dict(net.state_dict())


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: "net", "pass a module"),
        (lambda: nn.DataParallel(nn.Linear(1, 1)), "pass the module inside"),
        (lambda: torch.compile(nn.Linear(1, 1)), "before `torch.compile`"),
        (lambda: OwnCall(1, 1), "its class defines `__call__`"),
    ],
)
def test_what_cannot_be_made_parallel_is_refused(make: Any, hint: str) -> None:
    with pytest.raises(UserTypeError, match="cannot be made parallel") as raised:
        parallelize(make())
    assert hint in str(raised.value)


class Taken(nn.Module):
    """Holds things under names of Cell's own methods."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.phase = nn.ModuleList([nn.Linear(2, 2)]), 3
        self.register_buffer("recompute", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.cells[0](x) * self.phase + self.recompute


def test_what_a_module_holds_under_a_name_of_cell_stays() -> None:
    plain, x = Taken(), torch.ones(1, 2)
    wanted = plain(x)
    net = parallelize(plain)
    assert torch.equal(net(x), wanted)
    net.phase = 4
    assert (net.phase, net.recompute.tolist(), len(net.cells)) == (4, [1.0], 1)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(twin(x), net(x))


def test_torchs_own_tools_work_on_cells() -> None:
    net, x = dc.nn.Dense(2, 2), torch.ones(1, 2)
    wanted = net(x)
    torch.nn.utils.parametrize.register_parametrization(net, "weight", nn.Identity())
    assert torch.allclose(net(x), wanted)
    net(x).sum().backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.slow
def test_torch_compile_takes_a_cell() -> None:
    net, x = dc.nn.SequentialCell(dc.nn.Dense(2, 2), dc.nn.ReLU()), torch.ones(1, 2)
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), net(x))
