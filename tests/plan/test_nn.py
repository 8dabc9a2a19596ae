"""Layers, losses and optimizers give torch's results under MindSpore's names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from distcell import nn, ops
from distcell.cell import Cell
from distcell.errors import UserTypeError
from distcell.parameter import Parameter

X = torch.linspace(-2, 2, 24)
IMAGES = torch.linspace(-1, 1, 2 * 3 * 7 * 7).reshape(2, 3, 7, 7)

LAYERS: list[tuple[Callable[[], Cell], Callable[[], torch.nn.Module], Tensor]] = [
    (lambda: nn.Dense(3, 4), lambda: torch.nn.Linear(3, 4), X.view(8, 3)),
    (lambda: nn.Dense(3, 4, False), lambda: torch.nn.Linear(3, 4, bias=False), X.view(8, 3)),
    (lambda: nn.Embedding(5, 2), lambda: torch.nn.Embedding(5, 2), torch.tensor([[0, 4], [1, 1]])),
    (
        lambda: nn.Embedding(5, 2, padding_idx=1),
        lambda: torch.nn.Embedding(5, 2, padding_idx=1),
        torch.tensor([1, 2]),
    ),
    (lambda: nn.LayerNorm(6), lambda: torch.nn.LayerNorm(6), X.view(4, 6)),
    (
        lambda: nn.LayerNorm((2, 3), epsilon=0.1),
        lambda: torch.nn.LayerNorm((2, 3), eps=0.1),
        X.view(4, 2, 3),
    ),
    (lambda: nn.RMSNorm(6), lambda: torch.nn.RMSNorm(6, eps=1e-6), X.view(4, 6)),
    (lambda: nn.BatchNorm2d(3), lambda: torch.nn.BatchNorm2d(3), IMAGES),
    (
        lambda: nn.BatchNorm2d(3, momentum=0.75),
        lambda: torch.nn.BatchNorm2d(3, momentum=0.25),
        IMAGES,
    ),
    (nn.ReLU, torch.nn.ReLU, X),
    (nn.GELU, lambda: torch.nn.GELU("tanh"), X),
    (lambda: nn.GELU(approximate=False), torch.nn.GELU, X),
    (nn.SiLU, torch.nn.SiLU, X),
    (nn.Sigmoid, torch.nn.Sigmoid, X),
    (nn.Tanh, torch.nn.Tanh, X),
    (nn.Softmax, lambda: torch.nn.Softmax(-1), X.view(4, 6)),
    (lambda: nn.Softmax(axis=0), lambda: torch.nn.Softmax(0), X.view(4, 6)),
    (lambda: nn.Dropout(p=0.25), lambda: torch.nn.Dropout(0.25), X),
    (
        lambda: nn.Conv2d(3, 4, 3, pad_mode="valid", has_bias=True),
        lambda: torch.nn.Conv2d(3, 4, 3),
        IMAGES,
    ),
    (
        lambda: nn.Conv2d(3, 6, 3, pad_mode="pad", padding=2, stride=2, dilation=2, group=3),
        lambda: torch.nn.Conv2d(3, 6, 3, 2, 2, 2, 3, bias=False),
        IMAGES,
    ),
    (
        lambda: nn.Conv2d(3, 4, (3, 5)),
        lambda: torch.nn.Conv2d(3, 4, (3, 5), padding="same", bias=False),
        IMAGES,
    ),
    (lambda: nn.MaxPool2d(3, stride=2), lambda: torch.nn.MaxPool2d(3, 2), IMAGES),
    (lambda: nn.MaxPool2d(2), lambda: torch.nn.MaxPool2d(2, 1), IMAGES),
    (
        lambda: nn.AvgPool2d(3, stride=2, pad_mode="pad", padding=1),
        lambda: torch.nn.AvgPool2d(3, 2, 1),
        IMAGES,
    ),
    (nn.Flatten, torch.nn.Flatten, IMAGES),
    (nn.Identity, torch.nn.Identity, X),
    (nn.ReLU6, torch.nn.ReLU6, 5 * X),
    (nn.LeakyReLU, lambda: torch.nn.LeakyReLU(0.2), X),
    (lambda: nn.ELU(0.5), lambda: torch.nn.ELU(0.5), X),
    (lambda: nn.PReLU(3), lambda: torch.nn.PReLU(3), IMAGES),
    (nn.Mish, torch.nn.Mish, X),
    (nn.HSwish, torch.nn.Hardswish, 3 * X),
    (nn.HSigmoid, torch.nn.Hardsigmoid, 3 * X),
    (nn.LogSigmoid, torch.nn.LogSigmoid, X),
    (nn.LogSoftmax, lambda: torch.nn.LogSoftmax(-1), X.view(4, 6)),
    (
        lambda: nn.Conv1d(3, 4, 3, pad_mode="pad", padding=1, has_bias=True),
        lambda: torch.nn.Conv1d(3, 4, 3, padding=1),
        X.view(2, 3, 4),
    ),
    (
        lambda: nn.Conv1d(3, 4, 3),
        lambda: torch.nn.Conv1d(3, 4, 3, padding="same", bias=False),
        X.view(2, 3, 4),
    ),
    (
        lambda: nn.Conv2dTranspose(3, 4, 2, 2, pad_mode="pad", padding=1, has_bias=True),
        lambda: torch.nn.ConvTranspose2d(3, 4, 2, 2, 1),
        IMAGES,
    ),
    (lambda: nn.AdaptiveAvgPool2d(2), lambda: torch.nn.AdaptiveAvgPool2d(2), IMAGES),
    (lambda: nn.BatchNorm1d(6), lambda: torch.nn.BatchNorm1d(6), X.view(4, 6)),
    (lambda: nn.BatchNorm3d(3), lambda: torch.nn.BatchNorm3d(3), IMAGES.view(2, 3, 7, 7, 1)),
    (lambda: nn.GroupNorm(1, 3), lambda: torch.nn.GroupNorm(1, 3), IMAGES),
]


@pytest.mark.parametrize(("ours", "theirs", "x"), LAYERS)
def test_a_layer_has_torchs_values_gradients_and_buffers(
    ours: Callable[[], Cell], theirs: Callable[[], torch.nn.Module], x: Tensor
) -> None:
    results = []
    for make in (ours, theirs):
        torch.manual_seed(0)
        layer = make()
        y = layer(x.clone().requires_grad_(x.is_floating_point()))
        y.square().sum().backward() if y.requires_grad else None
        grads = {n: p.grad for n, p in layer.named_parameters()}
        results.append((layer, y, grads))
    (layer, y, grads), (wanted_layer, wanted_y, wanted_grads) = results
    assert isinstance(layer, Cell)
    assert isinstance(layer, type(wanted_layer))
    assert torch.equal(y, wanted_y)
    assert {n: g.tolist() for n, g in grads.items()} == {
        n: g.tolist() for n, g in wanted_grads.items()
    }
    assert {n: v.tolist() for n, v in layer.state_dict().items()} == {
        n: v.tolist() for n, v in wanted_layer.state_dict().items()
    }
    assert all(isinstance(p, Parameter) for p in layer.parameters())
    assert torch.equal(layer.eval().construct(x), wanted_layer.eval()(x))


@pytest.mark.parametrize("size", [5, 6, 7, 8])
@pytest.mark.parametrize(("kernel", "stride", "dilation"), [(3, 2, 1), (2, 3, 1), (3, 2, 2)])
def test_same_padding_gives_the_size_over_the_stride_rounded_up(
    size: int, kernel: int, stride: int, dilation: int
) -> None:
    conv = nn.Conv2d(1, 1, kernel, stride=stride, dilation=dilation)
    x = torch.randn(1, 1, size, size)
    wanted = -(-size // stride)
    assert conv(x).shape == (1, 1, wanted, wanted)
    missing = max((wanted - 1) * stride + dilation * (kernel - 1) + 1 - size, 0)
    pads = (missing // 2, missing - missing // 2) * 2
    padded = torch.nn.functional.pad(x, pads)
    assert torch.equal(
        conv(x),
        torch.nn.functional.conv2d(padded, conv.weight, stride=stride, dilation=dilation),
    )


def test_padding_that_means_nothing_is_refused() -> None:
    with pytest.raises(UserTypeError, match="no pad_mode `smae`") as raised:
        nn.Conv2d(1, 1, 3, pad_mode="smae")
    assert raised.value.hint == "did you mean `same`?"
    with pytest.raises(UserTypeError, match="padding=1 means nothing with pad_mode=`same`"):
        nn.Conv2d(1, 1, 3, padding=1)
    with pytest.raises(UserTypeError, match="no pad_mode `same`"):
        nn.MaxPool2d(2, pad_mode="same")


def test_a_sequential_cell_takes_cells_a_list_or_an_ordered_dict() -> None:
    a, b, x = torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.ones(1, 2)
    for made in (nn.SequentialCell(a, b), nn.SequentialCell([a, b])):
        assert torch.equal(made(x), b(a(x)))
        assert [p.name for p in made.trainable_params()] == ["0.weight", "0.bias"]
    named = nn.SequentialCell(OrderedDict(first=a, second=b))
    assert [name for name, _ in named.parameters_and_names()] == ["first.weight", "first.bias"]
    assert torch.equal(named(x), b(a(x)))


def test_a_cell_list_names_what_is_appended() -> None:
    net = Cell()
    net.layers = nn.CellList([nn.Dense(2, 2)])
    net.layers.append(nn.Dense(2, 2))
    assert [p.name for p in net.trainable_params()][2:] == ["layers.1.weight", "layers.1.bias"]
    assert net.layers[1].cell_path == "layers.1"
    assert len(nn.CellList(nn.ReLU(), nn.ReLU())) == 2


A, B = torch.linspace(-2, 2, 12).view(3, 4), torch.linspace(1, -1, 12).view(3, 4)
CLASSES = torch.tensor([0, 3, 1])
LOSSES: list[tuple[Cell, torch.nn.Module, Tensor, Tensor]] = [
    (nn.MSELoss(), torch.nn.MSELoss(), A, B),
    (nn.L1Loss(), torch.nn.L1Loss(), A, B),
    (nn.BCELoss(), torch.nn.BCELoss(), A.sigmoid(), B.sigmoid()),
    (nn.NLLLoss(), torch.nn.NLLLoss(), A.log_softmax(-1), CLASSES),
    (nn.MSELoss("sum"), torch.nn.MSELoss(reduction="sum"), A, B),
    (nn.HuberLoss(delta=0.5), torch.nn.HuberLoss(delta=0.5), A, B),
    (nn.SmoothL1Loss(0.5), torch.nn.SmoothL1Loss(beta=0.5, reduction="none"), A, B),
    (nn.BCEWithLogitsLoss(), torch.nn.BCEWithLogitsLoss(), A, B.sigmoid()),
    (
        nn.BCEWithLogitsLoss("sum", pos_weight=torch.ones(4) * 2),
        torch.nn.BCEWithLogitsLoss(reduction="sum", pos_weight=torch.ones(4) * 2),
        A,
        B.sigmoid(),
    ),
    (nn.CrossEntropyLoss(), torch.nn.CrossEntropyLoss(), A, CLASSES),
    (
        nn.CrossEntropyLoss(torch.arange(4.0), ignore_index=3, label_smoothing=0.1),
        torch.nn.CrossEntropyLoss(torch.arange(4.0), ignore_index=3, label_smoothing=0.1),
        A,
        CLASSES,
    ),
    (
        nn.SoftmaxCrossEntropyWithLogits(sparse=True),
        torch.nn.CrossEntropyLoss(reduction="none"),
        A,
        CLASSES,
    ),
    (
        nn.SoftmaxCrossEntropyWithLogits(reduction="mean"),
        torch.nn.CrossEntropyLoss(),
        A,
        B.softmax(-1),
    ),
]


@pytest.mark.parametrize(("ours", "theirs", "x", "target"), LOSSES)
def test_a_loss_is_torchs(ours: Cell, theirs: torch.nn.Module, x: Tensor, target: Tensor) -> None:
    assert isinstance(ours, Cell)
    assert torch.equal(ours(x, target), theirs(x, target))


def test_a_loss_refuses_what_it_does_not_know() -> None:
    with pytest.raises(UserTypeError, match="no reduction `maen`") as raised:
        nn.MSELoss("maen")
    assert raised.value.hint == "did you mean `mean`?"
    with pytest.raises(UserTypeError, match="with sparse=False they are probabilities") as raised:
        nn.SoftmaxCrossEntropyWithLogits()(A, CLASSES)
    assert raised.value.hint == "pass sparse=True"


OPTIMIZERS: list[tuple[Any, Any]] = [
    (
        lambda p: nn.SGD(p, learning_rate=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.01, nesterov=True),
    ),
    (lambda p: nn.Momentum(p, 0.1, 0.8), lambda p: torch.optim.SGD(p, 0.1, 0.8)),
    (
        lambda p: nn.Adam(p, learning_rate=0.1, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, 0.1, (0.8, 0.9), 1e-3, 0.1),
    ),
    (
        lambda p: nn.RMSProp(p, learning_rate=0.01, decay=0.8, momentum=0.5),
        lambda p: torch.optim.RMSprop(p, 0.01, 0.8, 1e-10, momentum=0.5),
    ),
    (
        lambda p: nn.Adagrad(p, 0.2, 0.01),
        lambda p: torch.optim.Adagrad(p, 0.01, initial_accumulator_value=0.2),
    ),
    (
        lambda p: nn.AdamWeightDecay(p, learning_rate=0.1, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, 0.1, eps=1e-6, weight_decay=0.1),
    ),
]


@pytest.mark.parametrize(("ours", "theirs"), OPTIMIZERS)
def test_an_optimizer_steps_as_torchs(ours: Any, theirs: Any) -> None:
    weights = []
    for make in (ours, theirs):
        torch.manual_seed(0)
        net = nn.Dense(4, 2)
        optimizer = make(net.trainable_params())
        assert isinstance(optimizer, torch.optim.Optimizer)
        for _ in range(3):
            net(A).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append([p.tolist() for p in net.parameters()])
    assert weights[0] == weights[1]


def test_functions_are_torchs() -> None:
    assert torch.equal(ops.dense(A, B), A @ B.T)
    assert torch.equal(ops.softmax(A, axis=0), A.softmax(0))
    assert torch.equal(ops.log_softmax(A), A.log_softmax(-1))
    assert torch.equal(ops.gelu(A), torch.nn.functional.gelu(A))
    assert torch.equal(ops.sum(A, axis=(0, 1), keep_dims=True), A.sum((0, 1), keepdim=True))
    assert torch.equal(ops.mean(A), A.mean())
    assert torch.equal(ops.transpose(A, (1, 0)), A.T)
    assert torch.equal(ops.cat([A, B], axis=1), torch.cat([A, B], 1))
    assert torch.equal(ops.stack([A, B], axis=-1), torch.stack([A, B], -1))
    assert torch.equal(ops.relu(A), A.relu())


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_a_recurrent_layer_is_torchs(kind: str) -> None:
    x, results = torch.randn(5, 2, 3), []
    settings: dict[str, Any] = {"num_layers": 2, "bidirectional": True}
    for made in (
        lambda: getattr(nn, kind)(3, 4, has_bias=False, **settings),
        lambda: getattr(torch.nn, kind)(3, 4, bias=False, **settings),
    ):
        torch.manual_seed(0)
        results.append(made()(x)[0])
    assert torch.equal(*results)


def test_attention_is_torchs() -> None:
    x, results = torch.randn(5, 2, 4), []
    for made in (nn.MultiheadAttention(4, 2, has_bias=False), torch.nn.MultiheadAttention(4, 2)):
        with torch.no_grad():
            for param in made.parameters():
                param.fill_(0.5 if param.dim() > 1 else 0.0)
        results.append(made(x, x, x)[0])
    assert torch.equal(*results)


def test_a_weight_starts_as_it_is_told() -> None:
    assert nn.Dense(2, 3, weight_init="ones", bias_init=2.0).bias.tolist() == [2.0] * 3
    wanted = torch.randn(3, 2)
    assert torch.equal(nn.Dense(2, 3, weight_init=wanted).weight, wanted)
    torch.manual_seed(0)
    weight = nn.Conv2d(32, 32, 3, weight_init="normal").weight
    assert abs(weight.std().item() - 0.01) < 1e-3
    for name in ("HeUniform", "he_normal", "XavierUniform", "TruncatedNormal", "uniform", "zeros"):
        nn.Dense(2, 3, weight_init=name)
    with pytest.raises(ValueError, match="no `weight_init` 'onse'"):
        nn.Dense(2, 3, weight_init="onse")
    with pytest.raises(ValueError, match=r"`weight_init` is \[2, 3\], the parameter \[3, 2\]"):
        nn.Dense(2, 3, weight_init=wanted.T)
    with pytest.raises(UserTypeError, match="`bias_init` is a list"):
        nn.Dense(2, 3, bias_init=[1.0])  # type: ignore[arg-type]


def test_a_cell_dict_names_its_cells() -> None:
    cells = nn.CellDict({"a": nn.Dense(1, 1), "b": nn.ReLU()})
    assert [name for name, _ in cells.parameters_and_names()] == ["a.weight", "a.bias"]


def test_a_pipeline_cell_sums_over_parts_of_the_batch() -> None:
    net = nn.WithLossCell(nn.Dense(4, 4), nn.MSELoss())
    cell, x, y = nn.PipelineCell(net, 2), torch.randn(6, 4), torch.randn(6, 4)
    assert torch.allclose(cell(x, y), net(x[:3], y[:3]) + net(x[3:], y[3:]))
    with pytest.raises(ValueError, match="5 rows, which do not divide by micro_size=2"):
        cell(x[:5], y[:5])
    with pytest.raises(ValueError, match="at least 1 part"):
        nn.PipelineCell(net, 0)
    with pytest.raises(TypeError, match=r"`micro_size` is 2\.0"):
        nn.PipelineCell(net, 2.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`network` is a function"):
        nn.PipelineCell(lambda x: x, 2)  # type: ignore[arg-type]


def test_grad_operation_gives_gradients_of_inputs_and_parameters() -> None:
    net, x = nn.Dense(4, 2), A
    of_first = ops.GradOperation()(net)(x)
    assert torch.allclose(of_first, torch.ones(3, 2) @ net.weight)
    of_params = ops.GradOperation(get_by_list=True)(net, net.trainable_params())(x)
    assert torch.allclose(of_params[0], torch.ones(2, 3) @ x)
    both = ops.GradOperation(get_all=True, get_by_list=True, sens_param=True)(net)
    (of_inputs,), found = both(x, torch.full((3, 2), 2.0))
    assert torch.allclose(of_inputs, 2 * of_first)
    assert torch.allclose(found[0], 2 * of_params[0])
    with pytest.raises(TypeError, match="needs parameters"):
        ops.GradOperation(get_by_list=True)(torch.exp)
    with pytest.raises(TypeError, match="`get_all` is 1"):
        ops.GradOperation(get_all=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no input has a gradient"):
        ops.GradOperation()(lambda number: net(x))(1)


def test_primitives_are_functions_with_their_settings() -> None:
    assert torch.equal(ops.ReLU()(A), A.relu())
    assert torch.equal(ops.MatMul(transpose_b=True)(A, B), A @ B.T)
    assert torch.equal(ops.MatMul(transpose_a=True)(A, B), A.T @ B)
    assert torch.equal(ops.ReduceSum(keep_dims=True)(A, 1), A.sum(1, keepdim=True))
    assert torch.equal(ops.ReduceMean()(A), A.mean())
    assert torch.equal(ops.Concat(axis=1)([A, B]), torch.cat([A, B], 1))
    assert torch.equal(ops.Cast()(A, torch.float64), A.double())
    assert torch.equal(ops.OneHot()(CLASSES, 4, 1.0, 0.0), torch.eye(4)[CLASSES])
    assert repr(ops.Softmax(axis=0)) == "Softmax(axis=0)"
    assert torch.equal(ops.gather(A, torch.tensor([[1, 0]]), 0), A[torch.tensor([[1, 0]])])
    assert torch.equal(ops.clip_by_value(A, -1, 1), A.clamp(-1, 1))
    assert torch.equal(ops.expand_dims(A, -1), A[..., None])
    assert torch.equal(ops.argmax(A, axis=1), A.argmax(1))
    assert [p.tolist() for p in ops.split(A, [1, 2])] == [A[:1].tolist(), A[1:].tolist()]
