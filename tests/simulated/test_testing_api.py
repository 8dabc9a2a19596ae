"""The public API for tests: plans and simulations, used as a user of distcell would use them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import distcell as dc
from distcell.errors import DataError, NotFoundError, StrategyError, UserTypeError
from distcell.graph import Graph, Input, Op, Output, Value
from distcell.layout import Layout, Part, canonical
from distcell.mesh import Mesh
from distcell.partition.emit import Emitter
from distcell.program import Program
from distcell.simulate.values import SimulatedRanks, gather, scatter
from distcell.strategy import load_strategy
from distcell.testing import Simulation

MEGATRON = """
distcell: 1
mesh: {dp: -1, tp: 2}
inputs: {"*": [dp]}
cells:
  up: {params: {weight: [tp, _], bias: [tp]}}
  down: {params: {weight: [_, tp], bias: [_]}}
"""

IN_A_LOSS = MEGATRON.replace("up:", "mlp.up:").replace("down:", "mlp.down:")


class Mlp(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(torch.relu(self.up(x))))


class MlpLoss(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.mlp = Mlp(width, dropout)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.mlp(x), target)


@pytest.fixture
def mlp() -> Mlp:
    torch.manual_seed(0)
    return Mlp()


# - Propagation, as a user would test it


def test_two_layers_split_as_megatron_does_need_one_all_reduce_forward(mlp: Mlp) -> None:
    plan = dc.plan(mlp, torch.ones(6, 8), MEGATRON, ranks=4)

    assert str(plan.mesh) == "dp=2 tp=2"
    assert str(plan.layout("up.weight")) == "[32@tp, 8]"
    assert str(plan.layout("down.weight")) == "[8, 32@tp]"
    assert str(plan.layout("x")) == "[6@dp, 8]"
    assert str(plan.layout("up")) == "[6@dp, 32@tp]"
    assert str(plan.layout("down")) == "[6@dp, 8]"
    assert [str(layout) for layout in plan.input_layouts("down")] == ["[6@dp, 32@tp]"]

    # the output is global on every rank, so its parts of the batch are gathered at the end
    forward = [c for c in plan.collectives if c.phase == "forward"]
    assert [(c.kind, c.axes) for c in forward] == [("all_reduce", ("tp",)), ("all_gather", ("dp",))]
    reduced = 3 * 8 * 4
    assert forward[0].bytes == (reduced,) * 4
    assert forward[0].cell == "down"
    assert not [note for note in plan.notes if note.kind == "no rule"]


def test_a_tensor_parallel_mlp_reduces_once_forward_and_once_for_what_enters(mlp: Mlp) -> None:
    text = MEGATRON.replace("{dp: -1, tp: 2}", "{tp: -1}").replace('inputs: {"*": [dp]}', "")
    x = torch.ones(6, 8, requires_grad=True)
    plan = dc.plan(mlp, x, text, ranks=2)
    assert [(c.phase, c.kind) for c in plan.collectives] == [
        ("forward", "all_reduce"),
        ("backward", "all_reduce"),
    ]
    assert plan.bytes_by_axes["tp"].most == 2 * 6 * 8 * 4


def test_the_reason_of_an_axis_leads_back_to_the_line_of_the_strategy(mlp: Mlp) -> None:
    plan = dc.plan(mlp, torch.ones(6, 8), "tensor", ranks=2)
    text = plan.explain("up")
    assert "output 0 of `up`  f32[6, 32@tp]" in text
    assert "along aten.addmm.default in up" in text
    assert "annotated at strategies/tensor.yaml:" in text
    value = plan.planned.plan.value_of("up.weight")
    assert plan.reasons[value][0].kind == "annotation"


def test_a_plan_prints_its_parameters_collectives_and_bytes(mlp: Mlp) -> None:
    text = str(dc.plan(mlp, torch.ones(6, 8), MEGATRON, ranks=4))
    lines = [line.split() for line in text.splitlines()]
    assert ["up.weight", "f32[32@tp,", "8]", "512", "B", "1.0", "KiB"] in lines
    assert ["backward", "all_reduce", "dp", "1", "1.1", "KiB"] in lines
    assert "optimizer state (assumed: two values for each element, as of Adam)" in text
    assert "ops without a rule (they run replicated): none" in text


def test_a_strategy_may_be_a_name_a_path_a_text_or_a_value(mlp: Mlp, tmp_path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(MEGATRON, encoding="utf-8")
    x = torch.ones(6, 8)
    plans = [dc.plan(mlp, x, s, ranks=4) for s in (MEGATRON, file, str(file), load_strategy(file))]
    assert len({plan.program.digest for plan in plans}) == 1
    assert str(dc.plan(mlp, (x,), "data", ranks=2).layout("x")) == "[6@dp, 8]"
    assert str(dc.plan(mlp, {"x": x}, "data", ranks=2).layout("x")) == "[6@dp, 8]"


def test_what_a_plan_does_not_have_is_named(mlp: Mlp) -> None:
    plan = dc.plan(mlp, torch.ones(6, 8), "data", ranks=2)
    with pytest.raises(NotFoundError, match=r"no `up.wieght`[\s\S]*did you mean `up.weight`"):
        plan.layout("up.wieght")
    with pytest.raises(NotFoundError, match=r"`up\.wieght`"):
        plan.explain("up.wieght")
    with pytest.raises(UserTypeError, match="a int cannot be planned"):
        dc.plan(3, torch.ones(1), "data", ranks=2)  # type: ignore[arg-type]
    with pytest.raises(UserTypeError, match="`inputs` is a int"):
        dc.plan(mlp, 3, "data", ranks=2)  # type: ignore[arg-type]
    with pytest.raises(UserTypeError, match="`strategy` is a int"):
        dc.plan(mlp, torch.ones(6, 8), 3, ranks=2)  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match="multiple of 2 ranks"):
        dc.plan(mlp, torch.ones(6, 8), MEGATRON, ranks=3)


# - Simulation


def test_the_simulation_gives_every_ranks_values_and_the_global_ones(mlp: Mlp) -> None:
    x = torch.arange(48.0).reshape(6, 8) / 48
    result = dc.simulate(dc.plan(mlp, x, MEGATRON, ranks=4))
    expected = mlp(x)
    expected.sum().backward()

    torch.testing.assert_close(result.outputs, expected.detach())
    for path, parameter in mlp.named_parameters():
        torch.testing.assert_close(result.gradients[path], parameter.grad)
    pieces = result.on_ranks("up.weight")
    assert [tuple(piece.shape) for piece in pieces] == [(16, 8)] * 4
    assert torch.equal(torch.cat(pieces[:2]), mlp.up.weight)
    grads = result.gradient_on_ranks("down.weight")
    torch.testing.assert_close(torch.cat(grads[:2], 1), mlp.down.weight.grad)
    hidden = result.on_ranks("relu")
    torch.testing.assert_close(
        torch.cat([torch.cat(hidden[:2], 1), torch.cat(hidden[2:], 1)]), torch.relu(mlp.up(x))
    )


def test_the_simulation_counts_what_the_plan_says(mlp: Mlp) -> None:
    plan = dc.plan(mlp, torch.ones(5, 8), MEGATRON, ranks=4)
    result = dc.simulate(plan)
    for rank in range(4):
        told: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
        for one in plan.collectives:
            count, size = told.get((one.kind, one.axes), (0, 0))
            told[one.kind, one.axes] = (count + 1, size + one.bytes[rank])
        assert result.totals(rank) == told
    sizes = [result.bytes_by_axes(rank)["tp"] for rank in range(4)]
    spread = plan.bytes_by_axes["tp"]
    assert (min(sizes), max(sizes)) == (spread.least, spread.most)
    assert spread.least < spread.most, "5 rows over 2 ranks"


def test_the_network_is_not_changed_by_a_simulation() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    result = dc.simulate(dc.plan(net, torch.randn(8, 4), "data", ranks=2), learning_rate=1.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert int(result.buffers["1.num_batches_tracked"]) == 1
    assert not torch.equal(result.weights["0.weight"], net[0].weight)


def test_other_inputs_of_the_same_shapes_may_be_simulated(mlp: Mlp) -> None:
    plan = dc.plan(mlp, torch.ones(6, 8), "data", ranks=2)
    x = torch.randn(6, 8)
    torch.testing.assert_close(dc.simulate(plan, x).outputs, mlp(x).detach())
    with pytest.raises(DataError, match=r"x: planned for \[6, 8\], given \[5, 8\]"):
        dc.simulate(plan, torch.ones(5, 8))


@pytest.mark.parametrize("order", ["rank", "ring", "tree"])
def test_the_order_of_reductions_changes_no_more_than_the_last_bits(mlp: Mlp, order) -> None:
    net = Mlp().double()
    plan = dc.plan(net, torch.randn(6, 8, dtype=torch.float64), MEGATRON, ranks=8)
    one, other = dc.simulate(plan), dc.simulate(plan, order=order)
    torch.testing.assert_close(one.outputs, other.outputs, rtol=1e-12, atol=1e-12)


# - One meaning


@pytest.mark.parametrize("strategy", ["data", "tensor", "data-tensor", IN_A_LOSS])
def test_an_mlp_with_dropout_means_the_same_under_every_strategy(
    assert_one_meaning: Callable[..., Simulation], strategy: str
) -> None:
    torch.manual_seed(1)
    net = MlpLoss(dropout=0.3).double()
    batch = torch.randn(7, 8, dtype=torch.float64), torch.randn(7, 8, dtype=torch.float64)
    result = assert_one_meaning(net, batch, strategy, 4)
    assert len(result.losses) == 3
    assert result.losses[2] != result.losses[0]


def test_a_network_that_means_something_else_is_told_apart(
    assert_one_meaning: Callable[..., Simulation], monkeypatch: pytest.MonkeyPatch
) -> None:
    from distcell.testing import equality

    real = equality.simulate

    def broken(*args, **kwargs):
        result = real(*args, **kwargs)
        return replace(
            result, gradients={p: 1.001 * g for p, g in result.gradients.items()}, weights={}
        )

    monkeypatch.setattr(equality, "simulate", broken)
    with pytest.raises(AssertionError) as caught:
        assert_one_meaning(MlpLoss(), (torch.randn(6, 8), torch.randn(6, 8)), "data", 2)
    text = str(caught.value)
    assert text.startswith("2 ranks under strategies/data.yaml do not mean what one device does:")
    assert "gradients: 4 compared" in text
    assert "mlp.up.weight: on one device alone" in text
    assert "losses" not in text


def test_an_ordinary_loop_runs_on_simulated_ranks(
    simulated_ranks: Callable[..., None],
) -> None:
    simulated_ranks(4, MEGATRON)
    torch.manual_seed(2)
    net, alone = dc.parallelize(Mlp()), Mlp()
    alone.load_state_dict(net.state_dict())
    x = torch.randn(6, 8)
    net(x).square().mean().backward()
    alone(x).square().mean().backward()
    assert str(dc.layout(net.up.weight)) == "[32@tp, 8]"
    for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


# - Laws of reshards: executed, not argued about


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    return Mesh(tuple((name, size) for name, size in zip("abc", sizes, strict=False)))


@st.composite
def layouts(draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...]) -> Layout:
    """Any layout of plain dims without partial sums: each axis on one dim or on none."""
    axes: list[list[str]] = [[] for _ in shape]
    for name in draw(st.permutations(mesh.names)):
        dim = draw(st.integers(-1, len(shape) - 1))
        if dim >= 0:
            axes[dim].append(name)
    dims = tuple((Part(size, tuple(a)),) for size, a in zip(shape, axes, strict=True))
    return canonical(Layout(dims), mesh)


def reshard(mesh: Mesh, layouts: list[Layout]) -> Program:
    """A program that takes a tensor in the first layout through the others, one after the other."""
    emitter = Emitter(mesh)
    value = Value("x", layouts[0].shape, "f64")
    emitter.add_value(value, layouts[0])
    name, outputs = "x", []
    for number, layout in enumerate(layouts[1:]):
        name = emitter.reshard(name, layout, Op("test"))
        outputs.append(Output(name, "output", str(number)))
    graph = Graph((Input("x", "input", "x"),), tuple(emitter.ops), tuple(outputs), emitter.values)
    return Program(mesh, graph, emitter.layouts)


@given(st.data())
def test_a_reshard_gives_each_rank_its_piece_of_the_target(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    source, target = (data.draw(layouts(mesh, shape)) for _ in range(2))
    program = reshard(mesh, [source, target])
    whole = torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    (pieces,) = SimulatedRanks(program).run([scatter(program, "x", whole)])
    for rank, piece in enumerate(pieces):
        assert torch.equal(piece, target.shard(whole, mesh, rank)), (str(source), str(target))


@given(st.data())
def test_a_reshard_there_and_back_changes_nothing(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    source, target = (data.draw(layouts(mesh, shape)) for _ in range(2))
    whole = torch.randn(shape, dtype=torch.float64)
    there = reshard(mesh, [source, target])
    back = reshard(mesh, [target, source])
    before = scatter(there, "x", whole)
    (middle,) = SimulatedRanks(there).run([list(before)])
    (after,) = SimulatedRanks(back).run([list(middle)])
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other), (str(source), str(target))


@given(st.data())
def test_partial_sums_become_any_layout_of_their_sum(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=2)))
    axis = data.draw(st.sampled_from(mesh.names))
    free = Mesh(tuple((name, size) for name, size in mesh.axes if name != axis))
    split = data.draw(layouts(free, shape)) if free.axes else Layout.of(shape)
    source = canonical(Layout(split.dims, (axis,)), mesh)
    target = data.draw(layouts(mesh, shape))
    program = reshard(mesh, [source, target])
    terms = [source.without_partial().shard(torch.randn(shape, dtype=torch.float64), mesh, rank)
             for rank in range(mesh.size)]  # fmt: skip
    terms = _replicated(terms, source, mesh)
    whole = source.gather(terms, mesh)
    (pieces,) = SimulatedRanks(program).run([terms])
    for rank, piece in enumerate(pieces):
        torch.testing.assert_close(piece, target.shard(whole, mesh, rank))


def _replicated(terms: list[Tensor], layout: Layout, mesh: Mesh) -> list[Tensor]:
    """The same term on ranks that the layout says hold the same."""
    rest = [name for name in mesh.names if name not in layout.axes]
    return [terms[min(mesh.group_of(rank, rest))] for rank in range(mesh.size)]


def test_gathering_what_was_scattered_is_the_identity() -> None:
    mesh = Mesh.parse("a=2 b=3")
    program = reshard(mesh, [Layout.of((5, 4), ("a", "b")), Layout.of((5, 4), ("b", None))])
    whole = torch.randn(5, 4, dtype=torch.float64)
    assert torch.equal(gather(program, "x", scatter(program, "x", whole)), whole)


def test_a_batch_of_one_is_split_over_ranks_that_then_hold_nothing(
    assert_one_meaning: Callable[..., Simulation],
) -> None:
    result = assert_one_meaning(Mlp().double(), torch.randn(1, 8, dtype=torch.float64), "data", 2)
    assert [tuple(piece.shape) for piece in result.on_ranks("x")] == [(1, 8), (0, 8)]
