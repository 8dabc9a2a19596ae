"""MindSpore's Cell: compiled, read back, split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import distcell as dc
from distcell import nn
from distcell.cell_graph import ParameterLayout
from tests.seeds.about import about

TEXT = """
distcell: 1
mesh: {d: 2, t: 4}
inputs: {x: [d]}
cells:
  up: {params: {weight: [t, _], bias: [t]}}
"""


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.spare = nn.Dense(32, 64), nn.Dense(1, 1)

    def construct(self, x: Tensor) -> Tensor:
        return self.up(x).relu()


@pytest.fixture
def parallel(simulated_ranks: Any) -> Net:
    simulated_ranks(8, TEXT)
    torch.manual_seed(0)
    return Net().set_auto_parallel()


X = torch.randn(16, 32)


@about("Cell.compile", "Cell.parameter_layout_dict")
def test_compile_fills_the_layouts_as_mindspore_writes_them(parallel: Net) -> None:
    assert parallel.parameter_layout_dict == {}
    parallel.compile(X)
    found = parallel.parameter_layout_dict
    assert sorted(found) == ["up.bias", "up.weight"]
    assert isinstance(found["up.weight"], ParameterLayout)
    assert found["up.weight"] == ([2, 4], [0, -1], [16, 32], 0, True, "", [64, 32])
    assert found["up.bias"].slice_shape == [16]
    assert parallel.parallel_parameter_name_list == [*found]
    parallel.parameter_layout_dict = {}
    assert parallel.parameter_layout_dict == {}
    with pytest.raises(TypeError, match="`parameter_layout_dict` is a list"):
        parallel.parameter_layout_dict = []  # type: ignore[assignment]


@pytest.mark.slow
def test_compile_without_inputs_is_torchs() -> None:
    net = Net()
    wanted = net(X)
    net.compile(backend="eager")
    assert torch.equal(net(X), wanted)
    with pytest.raises(TypeError, match="torch's options: `backend` is one"):
        net.compile(X, backend="eager")


@about("Cell.compile_and_run", "Cell.auto_parallel_compile_and_run")
def test_compile_and_run_gives_what_the_call_gives(parallel: Net) -> None:
    alone = Net()
    alone.load_state_dict(parallel.state_dict())
    assert parallel.auto_parallel_compile_and_run() is False
    assert torch.allclose(parallel.compile_and_run(X), alone(X), atol=1e-6)
    assert parallel.auto_parallel_compile_and_run() is True
    assert torch.equal(alone.compile_and_run(X), alone(X))
    assert alone.auto_parallel_compile_and_run() is False
    with pytest.raises(TypeError, match="takes the inputs of `construct`"):
        alone.compile_and_run()


@about("Cell.get_func_graph_proto")
def test_the_graph_is_bytes_that_are_always_the_same_and_read_back(parallel: Net) -> None:
    assert parallel.get_func_graph_proto() is None
    parallel.compile(X)
    proto = parallel.get_func_graph_proto()
    again = Net().set_auto_parallel()
    again.compile(torch.zeros(16, 32))
    assert proto == again.get_func_graph_proto()
    assert isinstance(proto, bytes)
    graph, mesh, layouts = dc.read_graph(proto)
    assert str(mesh) == "d=2 t=4"
    weight = next(item.value for item in graph.inputs if item.path == "up.weight")
    assert str(layouts[weight]) == "[64@t, 32]"
    assert "aten.relu.default" in [op.target for op in graph.ops]
    parallel.set_train(False)
    assert parallel.get_func_graph_proto() is None
    with pytest.raises(TypeError, match="a NoneType is no graph"):
        dc.read_graph(None)  # type: ignore[arg-type]


@about("Cell.load_parameter_slice")
def test_parameters_are_split_as_compiled_once(parallel: Net) -> None:
    with pytest.raises(RuntimeError, match="not compiled in phase `train`"):
        parallel.load_parameter_slice()
    parallel.compile(X)
    assert not parallel.up.weight.sliced
    values = torch.arange(64 * 32.0).view(64, 32)
    for _ in range(2):
        parallel.load_parameter_slice({"up.weight": values, "up.bias": parallel.up.bias})
        assert parallel.up.weight.sliced
        assert str(dc.layout(parallel.up.weight)) == "[64@t, 32]"
        assert str(parallel.up.weight).endswith("requires_grad=True, layout=[64@t, 32])")
        assert torch.equal(parallel.state_dict()["up.weight"], values)
    alone = Net()
    alone.load_state_dict(parallel.state_dict())
    assert torch.allclose(parallel(X), alone(X), rtol=1e-5)
    with pytest.raises(TypeError, match="`params` is a list"):
        parallel.load_parameter_slice([values])  # type: ignore[arg-type]
    with pytest.raises(KeyError, match=r"no parameter `up\.wieght`"):
        parallel.load_parameter_slice({"up.wieght": values})


@about("Cell.set_parallel_input_with_inputs")
def test_inputs_are_cut_as_compiled(parallel: Net) -> None:
    with pytest.raises(RuntimeError, match="not compiled"):
        parallel.set_parallel_input_with_inputs(X)
    assert parallel.parallel_inputs_run is None
    parallel.compile(X)
    for given in (((X,), {}), ((), {"x": X})):
        parallel.set_parallel_input_with_inputs(*given[0], **given[1])
        (piece,) = parallel.parallel_inputs_run or ()
        assert torch.equal(piece, X[:8])
    with pytest.raises(KeyError, match=r"no input `y`\n.*its inputs are x"):
        parallel.set_parallel_input_with_inputs(y=X)


@about("Cell.exec_checkpoint_graph")
def test_a_checkpoint_holds_global_values(parallel: Net) -> None:
    before = {key: value.clone() for key, value in parallel.state_dict().items()}
    parallel(X)
    found = parallel.exec_checkpoint_graph()
    assert list(found) == list(before)
    assert all(torch.equal(found[key], before[key]) for key in before)


@about("Cell.remove_redundant_parameters")
def test_parameters_that_the_graph_does_not_use_are_removed() -> None:
    net = Net()
    with pytest.raises(RuntimeError, match="not compiled"):
        net.remove_redundant_parameters()
    net.compile(X)
    net.remove_redundant_parameters()
    assert [name for name, _ in net.named_parameters()] == ["up.weight", "up.bias"]
    assert net.spare.weight is None
    assert torch.equal(net(X), net.up(X).relu())
