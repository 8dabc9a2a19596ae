"""What cannot be captured is an error that names cell and line, and leaves the module as it was."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import distcell as dc
from distcell.capture import call_key, capture_call
from distcell.context import LaunchOptions, set_launch
from distcell.errors import CaptureError
from distcell.testing import assert_one_meaning


class Inner(nn.Module):
    def __init__(self, does: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.does = nn.Linear(3, 3), does
        self.calls, self.kept, self.sizes = 0, None, [1, 2]
        self.unknown = float("nan")
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        self.average = y.detach().mean(0)
        return self.does(self, y)


class Outer(nn.Module):
    def __init__(self, does: Callable[..., Any]) -> None:
        super().__init__()
        self.block = nn.Sequential(Inner(does))

    def forward(self, x: Tensor) -> Any:
        return self.block(x)


def line_of(function: Callable[..., Any]) -> str:
    return f"tests/plan/test_capture_errors.py:{function.__code__.co_firstlineno + 1}"


def branch(cell: Inner, y: Tensor) -> Tensor:
    return y if y.sum() > 0 else -y


def item(cell: Inner, y: Tensor) -> Tensor:
    return y * y.max().item()


def as_int(cell: Inner, y: Tensor) -> Tensor:
    return y[: int(y.argmax())]


def as_list(cell: Inner, y: Tensor) -> Tensor:
    return y * y.tolist()[0][0]


def as_numpy(cell: Inner, y: Tensor) -> Tensor:
    return y * y.detach().numpy().mean()


def selected(cell: Inner, y: Tensor) -> Tensor:
    return y[y > 0]


def nonzero(cell: Inner, y: Tensor) -> Tensor:
    return y.nonzero()


@pytest.mark.parametrize("does", [branch, item, as_int, as_list, as_numpy, selected, nonzero])
def test_what_needs_a_value_names_cell_line_and_a_way_out(does: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(does)
    text = str(caught.value)
    assert text.startswith("cell `block.0` needs the value of a tensor")
    assert line_of(does) in text
    assert "torch.where" in text


def capture(does: Callable[..., Any]) -> Any:
    """Captures, and checks that the network is as before when that fails."""
    net = Outer(does)
    before = [dict(part.__dict__) for part in net.modules()]
    sizes, tensors = list(net.block[0].sizes), copy.deepcopy(net.state_dict())
    states = random.getstate(), np.random.get_state()[1].tobytes()
    try:
        return capture_call(net, (torch.ones(2, 3),), {})
    except Exception:
        for part, attributes in zip(net.modules(), before, strict=True):
            assert part.__dict__ == attributes
        assert net.block[0].sizes == sizes
        torch.testing.assert_close(net.state_dict(), tensors)
        assert not hasattr(net.block[0], "fresh")
        assert states == (random.getstate(), np.random.get_state()[1].tobytes())
        raise


def count(cell: Inner, y: Tensor) -> Tensor:
    cell.calls += 1
    return y


def add(cell: Inner, y: Tensor) -> Tensor:
    cell.fresh = 3
    return y


def append(cell: Inner, y: Tensor) -> Tensor:
    cell.sizes.append(3)
    return y


@pytest.mark.parametrize(("does", "name"), [(count, "calls"), (add, "fresh"), (append, "sizes")])
def test_an_attribute_that_the_call_changes_is_named(does: Any, name: str) -> None:
    with pytest.raises(CaptureError, match=rf"changes the attribute `block\.0\.{name}`"):
        capture(does)


def keep(cell: Inner, y: Tensor) -> Tensor:
    cell.kept = y
    return y


def keep_in_list(cell: Inner, y: Tensor) -> Tensor:
    cell.kept = [{"y": y}]
    return y


def make_buffer(cell: Inner, y: Tensor) -> Tensor:
    cell.register_buffer("fresh", y.detach())
    return y


@pytest.mark.parametrize(
    ("does", "name"), [(keep, "kept"), (keep_in_list, "kept"), (make_buffer, "fresh")]
)
def test_a_tensor_that_the_call_keeps_is_named(does: Any, name: str) -> None:
    with pytest.raises(CaptureError, match=rf"keeps a tensor in the attribute `block\.0\.{name}`"):
        capture(does)


def choose(cell: Inner, y: Tensor) -> Tensor:
    return y * random.choice([1, 2])


def draw(cell: Inner, y: Tensor) -> Tensor:
    return y * float(np.random.rand())


@pytest.mark.parametrize(("does", "library"), [(choose, "random"), (draw, "numpy.random")])
def test_random_numbers_that_are_not_torchs_name_the_cell(does: Any, library: str) -> None:
    message = rf"cell `block\.0` draws a number with Python's `{re.escape(library)}`"
    with pytest.raises(CaptureError, match=message):
        capture(does)


def test_a_call_that_changes_nothing_is_captured() -> None:
    assert capture(lambda cell, y: y * cell.sizes[1]).graph.ops


def test_several_attributes_are_told_at_once() -> None:
    def both(cell: Inner, y: Tensor) -> Tensor:
        cell.calls += 1
        cell.kept = y
        return y

    with pytest.raises(CaptureError, match="changes 2 attributes") as caught:
        capture(both)
    assert "block.0.calls" in str(caught.value) and "block.0.kept" in str(caught.value)


def test_an_error_of_the_users_own_stays_what_it_is() -> None:
    def fail(cell: Inner, y: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        capture(fail)
    with pytest.raises(RuntimeError, match="same reduction dim"):
        capture(lambda cell, y: y @ torch.ones(4, 4))


def test_writing_into_an_argument_is_an_error() -> None:
    class Writes(nn.Module):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return batch["x"].add_(1)

    with pytest.raises(CaptureError, match=r"writes into its argument `batch\.x`"):
        capture_call(Writes(), ({"x": torch.ones(2)},), {})


def test_a_tensor_that_is_no_parameter_and_requires_a_gradient_is_an_error() -> None:
    weight = torch.ones(3, requires_grad=True)
    with pytest.raises(CaptureError, match="requires a gradient and is no parameter"):
        capture(lambda cell, y: y * weight)


def test_a_plain_tensor_that_the_call_writes_into_is_named_and_as_before() -> None:
    def write(cell: Inner, y: Tensor) -> Tensor:
        cell.plain.add_(1)
        return y + cell.plain

    net = Outer(write)
    net.block[0].plain = torch.zeros(3)
    with pytest.raises(CaptureError, match=r"changes the attribute `block\.0\.plain`"):
        capture_call(net, (torch.ones(2, 3),), {})
    assert torch.equal(net.block[0].plain, torch.zeros(3))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(3, momentum=None), nn.BatchNorm2d(3, 0.1, None)])
def test_a_batch_norm_without_momentum_says_so(norm: nn.Module) -> None:
    x = torch.ones(2, 3) if isinstance(norm, nn.BatchNorm1d) else torch.ones(2, 3, 4, 4)
    with pytest.raises(CaptureError, match=r"cell `1` has `momentum=None`") as caught:
        capture_call(nn.Sequential(nn.Identity(), norm), (x,), {})
    assert "momentum=0.1" in str(caught.value)
    assert capture_call(nn.Sequential(norm).eval(), (x,), {}).graph.ops


class Strided(nn.Module):
    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        return self.does(x)


@pytest.mark.parametrize(
    ("does", "x"),
    [
        (lambda x: torch.as_strided(x, (2, 2), (1, 2)), torch.ones(2, 3).t()),
        (lambda x: torch.as_strided(x * 2, (2, 2), (1, 2)), torch.ones(2, 3).t()),
        (lambda x: torch.as_strided(x.t(), (2, 2), (1, 2)), torch.ones(2, 3)),
        (lambda x: torch.as_strided(x, (2,), (1,), 0), torch.ones(4, 3)[2:]),
        (lambda x: torch.as_strided(x[1:], (2,), (1,), 0), torch.ones(4, 3)),
    ],
    ids=["input", "computed", "transposed", "offset", "offset of a view"],
)
def test_a_view_by_strides_of_what_is_not_contiguous_is_an_error(does: Any, x: Tensor) -> None:
    with pytest.raises(CaptureError, match="cell `0` makes a view by strides") as caught:
        capture_call(nn.Sequential(Strided(does)), (x,), {})
    assert "tests/plan/test_capture_errors.py:" in str(caught.value)


def test_a_view_by_strides_of_contiguous_tensors_is_captured_and_not_used_for_others() -> None:
    net = nn.Sequential(Strided(lambda x: torch.as_strided(x * 2, (2, 2), (1, 2))))
    x = torch.arange(6.0).reshape(2, 3)
    graph = capture_call(net, (x,), {}).graph
    assert "aten.as_strided.default" in {op.target for op in graph.ops}
    assert call_key(net, (x,), {}) != call_key(net, (x.t().contiguous().t(),), {})


def test_a_view_by_strides_is_on_ranks_what_it_is_on_one_device() -> None:
    torch.set_num_threads(1)
    net = nn.Sequential(Strided(lambda x: torch.as_strided(x * 2, (3, 2), (1, 2))))
    x, twin = torch.randn(4, 3), dc.parallelize(copy.deepcopy(net))
    set_launch(LaunchOptions(mode="simulate", ranks=2, strategy="data"))
    try:
        assert torch.equal(twin(x), net(x))
        with pytest.raises(CaptureError, match="makes a view by strides"):
            twin(torch.randn(3, 4).t())
    finally:
        set_launch(LaunchOptions())


def scaled(cell: Inner, y: Tensor) -> Tensor:
    return (y * (1 + 2j)).abs()


def turned(cell: Inner, y: Tensor) -> Tensor:
    return torch.add(torch.complex(y, y), 1.0, alpha=2j).real


@pytest.mark.parametrize(("does", "number"), [(scaled, "(1+2j)"), (turned, "2j")])
def test_a_complex_number_names_cell_line_and_a_way_out(does: Any, number: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture_call(Outer(does), (torch.ones(4, 3),), {})
    assert caught.value.message.startswith("cell `block.0` computes with the complex number")
    assert line_of(does) in caught.value.where[0]
    assert caught.value.hint == f"make it a tensor: `torch.tensor({number})`"


def test_a_complex_tensor_is_captured() -> None:
    net = Outer(lambda cell, y: (y * torch.tensor(1 + 2j)).abs().sum())
    assert_one_meaning(net.double(), torch.ones(4, 3, dtype=torch.float64), "data", 2)


def gaussian(cell: Inner, y: Tensor) -> Tensor:
    return nn.functional.gaussian_nll_loss(y, y, y.exp())


def normal(cell: Inner, y: Tensor) -> Tensor:
    return torch.distributions.Normal(y, 1.0).log_prob(y)


def ctc(cell: Inner, y: Tensor) -> Tensor:
    ones = torch.tensor([1])
    return nn.functional.ctc_loss(y[:, None].log_softmax(-1), ones[None], ones + 1, ones)


def counted(cell: Inner, y: Tensor) -> Tensor:
    return torch.bincount(y.argmax(1), minlength=3)


def repeated(cell: Inner, y: Tensor) -> Tensor:
    return torch.repeat_interleave(y, y.argmax(1), 0)


ASKED = {
    gaussian: ("torch.nn.functional.gaussian_nll_loss", "write out its formula"),
    normal: ("torch.distributions.normal.Normal.__init__", "`validate_args=False`"),
    ctc: ("torch.nn.functional.ctc_loss", "call it outside"),
    counted: ("aten.bincount.default", "count by comparing"),
    repeated: ("aten.repeat_interleave.Tensor", "`output_size`"),
    selected: ("aten.index.Tensor", "`torch.where(mask, x, 0)`"),
}


@pytest.mark.parametrize("does", ASKED)
def test_what_asks_for_a_value_within_torch_is_named_with_its_way_out(does: Any) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(does)
    name, hint = ASKED[does]
    assert caught.value.where[0].startswith(f"{line_of(does).rpartition(':')[0]}:")
    assert f"calls {name}" in caught.value.where[0]
    assert hint in (caught.value.hint or "")


def test_the_ways_out_of_values_within_torch_can_be_captured() -> None:
    def does(cell: Inner, y: Tensor) -> Tensor:
        loss = 0.5 * (y.exp().log() + (y - y) ** 2 / y.exp()).mean()
        seen = torch.distributions.Normal(y, 1.0, validate_args=False).log_prob(y)
        count = (y.argmax(1).unsqueeze(-1) == torch.arange(3)).sum(0)
        again = torch.repeat_interleave(y, torch.ones(2, dtype=torch.int64), 0, output_size=2)
        return loss + seen.mean() + count + again + torch.where(y > 0, y, 0)

    assert capture(does).graph.ops


def test_a_sparse_gradient_is_refused_in_a_line() -> None:
    net = nn.Sequential(nn.Embedding(8, 4, sparse=True))
    with pytest.raises(CaptureError) as caught:
        capture_call(net, (torch.arange(4),), {})
    assert str(caught.value).startswith("cell `0` makes a sparse tensor")
    assert "use `sparse=False`" in (caught.value.hint or "")
    assert len(str(caught.value)) < 400


def pruned(cell: nn.Linear) -> None:
    prune.l1_unstructured(cell, "weight", 0.3)


@pytest.mark.parametrize(
    ("wrap", "instead"),
    [
        (nn.utils.weight_norm, "`torch.nn.utils.parametrizations.weight_norm`"),
        (nn.utils.spectral_norm, "`torch.nn.utils.parametrizations.spectral_norm`"),
        (pruned, "`torch.nn.utils.prune.remove(module, name)`"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_weight_that_a_hook_of_torch_makes_names_what_does_the_same(
    wrap: Any, instead: str
) -> None:
    net = nn.Sequential(nn.Linear(3, 3))
    wrap(net[0])
    with pytest.raises(CaptureError, match=r"in the attribute `0\.weight`") as caught:
        capture_call(net, (torch.ones(2, 3),), {})
    assert instead in (caught.value.hint or "")


def test_places_in_arguments_are_spelt_as_code() -> None:
    class Writes(nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return tensors[1].add_(1)

    with pytest.raises(CaptureError, match=r"its argument `tensors\[1\]`") as caught:
        capture_call(Writes(), (torch.ones(2), torch.ones(2)), {})
    assert "`tensors[1].clone()`" in (caught.value.hint or "")
