"""The captured training step does what loss.backward() and optimizer.step() do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distcell.capture import CapturedStep, capture_step, hyperparameters
from distcell.dtype import DTYPES
from distcell.errors import CaptureError
from distcell.graph import DeviceArg, DtypeArg, Graph, Ref, verify
from distcell.random import random_mode
from distcell.rules.table import implementation
from distcell.scope import track

KEY = torch.tensor([11, 2, 0])


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(graph: Graph, inputs: dict[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
    env = {i.value: inputs[i.kind, i.path] for i in graph.inputs}

    def value(arg: Any) -> Any:
        if isinstance(arg, Ref):
            return env[arg.name]
        if isinstance(arg, tuple):
            return [value(item) for item in arg]
        if isinstance(arg, DtypeArg):
            return DTYPES[arg.name]
        return torch.device("cpu") if isinstance(arg, DeviceArg) else arg

    with torch.no_grad():
        for op in graph.ops:
            function: Any = implementation(op.target)
            function = torch.reshape if op.target == "aten.view.default" else function
            result = function(*map(value, op.args), **{key: value(arg) for key, arg in op.kwargs})
            parts = [part for part in result if part is not None] if op.many else [result]
            env |= dict(zip(op.outputs, parts, strict=True))
    return {(o.kind, o.path): env[o.value] for o in graph.outputs}


class Steps:
    """Takes captured steps, keeping parameters, buffers and state outside of the module."""

    def __init__(self, net: nn.Module, captured: CapturedStep) -> None:
        verify(captured.graph)
        self.captured = captured
        self.held: dict[tuple[str, str], Any] = {("random", "key"): KEY}
        self.held |= {("param", n): p.detach().clone() for n, p in net.named_parameters()}
        self.held |= {("buffer", n): b.clone() for n, b in net.named_buffers()}
        self.held |= {("constant", n): c for n, c in captured.constants.items()}
        self.held |= {("state", n): meta.make() for n, meta in captured.state_meta.items()}

    def take(self, optimizer: torch.optim.Optimizer, **inputs: Tensor) -> Any:
        given = {("scalar", path): item for path, item in hyperparameters(optimizer)}
        given |= {("input", path): tensor for path, tensor in inputs.items()}
        made = run(self.captured.graph, self.held | given)
        self.held |= {k: item for k, item in made.items() if k[0] in ("param", "buffer", "state")}
        self.made = made
        outputs = [item for (kind, _), item in made.items() if kind == "output"]
        return self.captured.result(outputs)


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.drop, self.down = nn.Dropout(0.25), nn.Linear(8, 3)
        self.unused = nn.Linear(2, 2)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(F.gelu(self.norm(self.up(x)))))


def squares(net: nn.Module, x: Tensor, *, y: Tensor) -> Tensor:
    return F.mse_loss(net(x), y)


Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, maximize=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "rprop": torch.optim.Rprop,
}


@pytest.mark.slow
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
def test_three_steps_are_those_of_the_optimizer(make: Make) -> None:
    net, (x, y) = Net(), torch.randn(2, 6, 4, dtype=torch.float64)
    y = y[:, :3]
    captured = capture_step(net, squares, make(net.parameters()), (x,), {"y": y})
    compare(net, make, captured, x, y)


def test_a_learning_rate_that_is_a_tensor_is_a_number_of_the_step() -> None:
    tensor = capture(lambda p: torch.optim.Adam(p, lr=torch.tensor(0.5)))
    number = capture(lambda p: torch.optim.Adam(p, lr=0.5))
    assert tensor.scalars["group0.lr"] == 0.5
    assert tensor.graph.digest == number.graph.digest


def compare(net: nn.Module, make: Make, captured: CapturedStep, x: Tensor, y: Tensor) -> None:
    steps, optimizer = Steps(net, captured), make(net.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for name, item in steps.held.items():  # an optimizer may have state from the beginning
        for path, p in net.named_parameters():
            state = optimizer.state.get(p, {})
            if name[0] == "state" and name[1].rpartition("/")[0] == path and state:
                assert torch.equal(item, state[name[1].rpartition("/")[2]])
    for path, p in net.named_parameters():
        for name, item in optimizer.state.get(p, {}).items():
            steps.held["state", f"{path}/{name}"] = item.clone()
    for _ in range(3):
        loss = steps.take(optimizer, x=x, y=y)
        optimizer.zero_grad()
        with track(net), random_mode(KEY):
            expected = squares(net, x, y=y)
        expected.backward()
        optimizer.step()
        schedule.step()
        assert torch.equal(loss, expected)
        for path, p in net.named_parameters():
            close(steps.held["param", path], p)
            for name, item in optimizer.state.get(p, {}).items():
                close(steps.held["state", f"{path}/{name}"], item)
        for path, buffer in net.named_buffers():
            close(steps.held["buffer", path], buffer)


def close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def capture(make: Make, **options: Any) -> CapturedStep:
    net = Net()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    return capture_step(net, squares, make(net.parameters()), (x,), {"y": y}, **options)


def test_capturing_touches_neither_module_nor_optimizer() -> None:
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    squares(net, x, y=y).backward()
    optimizer.step()
    before = copy.deepcopy((net.state_dict(), optimizer.state_dict(), list(optimizer.__dict__)))
    captured = capture_step(net, squares, optimizer, (x,), {"y": y})
    after = (net.state_dict(), optimizer.state_dict(), list(optimizer.__dict__))
    torch.testing.assert_close(before[:2], after[:2], rtol=0, atol=0)
    assert before[2] == after[2]
    assert captured.state_meta == {}
    states = {i.path for i in captured.graph.inputs if i.kind == "state"}
    assert {"up.weight/step", "up.weight/exp_avg", "up.weight/exp_avg_sq"} <= states


def test_state_that_does_not_exist_yet_is_described() -> None:
    meta = capture(torch.optim.NAdam).state_meta
    product = meta["up.weight/mu_product"]
    assert (product.shape, product.dtype, product.fill) == ((), torch.float32, 1.0)
    average = meta["up.weight/exp_avg"]
    assert (average.shape, average.dtype, average.fill) == ((8, 4), torch.float64, 0.0)
    assert "unused.weight/exp_avg" not in meta


def test_state_is_described_at_global_shapes() -> None:
    net = Net()
    net.up.weight.data = net.up.weight.data[:2]
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    shapes = {"up.weight": (8, 4)}
    optimizer = torch.optim.Adam(net.parameters())
    captured = capture_step(net, squares, optimizer, (x,), {"y": y}, shapes=shapes)
    assert captured.state_meta["up.weight/exp_avg"].shape == (8, 4)
    optimizer.state[net.up.weight] = {
        "step": torch.zeros(()),
        "exp_avg": torch.zeros(2, 4, dtype=torch.float64),
        "exp_avg_sq": torch.zeros(2, 4, dtype=torch.float64),
    }
    again = capture_step(net, squares, optimizer, (x,), {"y": y}, shapes=shapes)
    assert again.graph.digest == captured.graph.digest


def test_hyperparameters_that_schedules_change_are_inputs() -> None:
    captured = capture(lambda p: torch.optim.AdamW(p, lr=0.5))
    assert captured.scalars == {
        "group0.lr": 0.5,
        "group0.betas.0": 0.9,
        "group0.betas.1": 0.999,
        "group0.weight_decay": 0.01,
    }
    assert {i.path for i in captured.graph.inputs if i.kind == "scalar"} == set(captured.scalars)
    other = capture(lambda p: torch.optim.AdamW(p, lr=0.25, betas=(0.8, 0.7)))
    assert other.graph.digest == captured.graph.digest


def test_groups_have_their_own_hyperparameters() -> None:
    def make(_: Any) -> torch.optim.Optimizer:
        groups = [{"params": net.up.parameters(), "lr": 0.3}, {"params": net.down.parameters()}]
        return torch.optim.SGD(groups, lr=0.1)

    net = Net()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    captured = capture_step(net, squares, make(None), (x,), {"y": y})
    assert captured.scalars == {"group0.lr": 0.3, "group1.lr": 0.1}
    assert {o.path.split(".")[0] for o in captured.graph.outputs if o.kind == "param"} == {
        "up",
        "down",
    }
    compare(net, make, captured, x, y)


def test_gradients_leave_the_graph_when_asked_for() -> None:
    assert not [o for o in capture(torch.optim.SGD).graph.outputs if o.kind == "grad"]
    asked = capture(torch.optim.SGD, with_grads=True).graph
    assert "up.weight" in [o.path for o in asked.outputs if o.kind == "grad"]


def test_gradients_can_be_clipped_before_the_update() -> None:
    def clip(parameters: list[Tensor]) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 0.1, foreach=False)

    net, make = Net(), lambda p: torch.optim.SGD(p, lr=0.5)
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    captured = capture_step(net, squares, make(net.parameters()), (x,), {"y": y}, adjust=clip)
    steps, optimizer = Steps(net, captured), make(net.parameters())
    steps.take(optimizer, x=x, y=y)
    with track(net), random_mode(KEY):
        squares(net, x, y=y).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1, foreach=False)
    optimizer.step()
    for path, p in net.named_parameters():
        close(steps.held["param", path], p)


def test_the_loss_may_return_more_than_the_loss() -> None:
    net = Net()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)

    def loss(net: nn.Module, x: Tensor) -> Any:
        out = net(x)
        return F.mse_loss(out, y), {"out": out, "note": "kept"}

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    captured = capture_step(net, loss, optimizer, (x,), {})
    assert list(captured.constants) == ["constant0"]
    result = Steps(net, captured).take(optimizer, x=x)
    assert result[0].shape == () and result[1]["out"].shape == (6, 3)
    assert result[1]["note"] == "kept"


def test_ops_of_the_update_are_of_the_phase_optimizer() -> None:
    graph = capture(torch.optim.Adam).graph
    assert {op.phase for op in graph.ops} == {"forward", "backward", "optimizer"}
    assert len([op for op in graph.ops if op.target == "py.sub" and op.args[0] == 1.0]) < 40


class Counting(torch.optim.SGD):
    """Counts in Python."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.count = getattr(self, "count", 0) + 1
        return super().step(closure)


class Scaling(torch.optim.SGD):
    """Keeps a number beside what torch keeps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.scale = 0.5

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad * self.scale
        return super().step(closure)


class Numbering(torch.optim.Optimizer):
    """Keeps a number in its state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["step"] = self.state[p].get("step", 0) + 1
                p.sub_(p.grad * group["lr"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.SGD(p, momentum=0.9, dampening=0.5), "first step of SGD is unlike"),
        (torch.optim.LBFGS, "LBFGS computes the loss again"),
        (torch.optim.ASGD, "ASGD decides by the value of a tensor"),
        (torch.optim.RAdam, "RAdam decides by the value of a tensor"),
        (lambda p: Counting(p, lr=0.1), "the step of Counting changes its `count`"),
        (Scaling, "Scaling reads its attribute `scale` in its step"),
        (Numbering, "keeps 1 as `step` of `up.weight`, which is no tensor"),
        (lambda p: torch.optim.SGD([*p, nn.Parameter(torch.ones(1))]), "has 1 parameters that are"),
    ],
)
def test_an_optimizer_that_cannot_be_captured_says_why(make: Make, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(make)


def test_hooks_that_would_not_be_called_are_refused() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    with pytest.raises(CaptureError, match="SGD has hooks on its step"):
        capture(make)
    net = Net()
    net.up.weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(CaptureError, match=r"`up\.weight` has a hook on its gradient"):
        capture_step(net, squares, torch.optim.SGD(net.parameters()), (torch.ones(6, 4),), {})


@pytest.mark.parametrize(
    "loss",
    [lambda net, x: net(x), lambda net, x: {"out": 3.0}, lambda net, x: x.sum()],
    ids=["vector", "number", "no_parameters"],
)
def test_a_loss_that_is_none_is_an_error(loss: Any) -> None:
    net = Net(torch.float32)
    with pytest.raises(CaptureError, match="the loss must be a scalar"):
        capture_step(net, loss, torch.optim.SGD(net.parameters()), (torch.ones(6, 4),), {})


class Coupled(torch.optim.Optimizer):
    """Divides by the norm of all gradients of the group."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            grads = [p.grad for p in group["params"] if p.grad is not None]
            norm = torch.stack([grad.norm() for grad in grads]).norm()
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad / norm, alpha=-group["lr"])


def test_updates_that_depend_on_each_other_stay_so() -> None:
    net, (x, y) = Net(), torch.randn(2, 6, 4, dtype=torch.float64)
    y = y[:, :3]
    captured = capture_step(net, squares, Coupled(net.parameters()), (x,), {"y": y})
    compare(net, Coupled, captured, x, y)


def test_parameters_that_are_alike_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = capture(torch.optim.Adam).graph
    monkeypatch.setattr("distcell.capture.update._updates_each_alone", lambda _: False)
    traced = capture(torch.optim.Adam).graph
    targets = sorted(op.target for op in graph.ops)
    assert targets == sorted(op.target for op in traced.ops)
    assert {(i.kind, i.path) for i in graph.inputs} == {(i.kind, i.path) for i in traced.inputs}
    assert {(o.kind, o.path) for o in graph.outputs} == {(o.kind, o.path) for o in traced.outputs}
