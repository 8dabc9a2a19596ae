"""MindSpore's Cell: names, children, parameters, flags, modes, hooks and casts."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor

import distcell as dc
from distcell import Parameter, nn
from tests.seeds.about import about


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.relu, self.down = nn.Dense(2, 4), nn.ReLU(), torch.nn.Linear(4, 2)

    def construct(self, x: Tensor) -> Tensor:
        return self.down(self.relu(self.up(x)))


NAMES = ["up.weight", "up.bias", "down.weight", "down.bias"]


# - Flags and modes


@about("Cell.flags", "Cell.add_flags", "Cell.get_flags")
def test_flags_are_attributes_and_do_not_write_over_others() -> None:
    cell = nn.Cell(flags={"sink": 3})
    assert (cell.sink, cell.get_flags()) == (3, {"sink": 3})
    assert cell.add_flags(sink=4, kind="a") is cell
    assert (cell.sink, cell.get_flags()) == (4, {"sink": 4, "kind": "a"})
    with pytest.raises(KeyError, match="a flag cannot be named `training`"):
        cell.add_flags(training=False)
    assert cell.add_flags(fp16=True).auto_cast_inputs((torch.ones(1),))[0].dtype == torch.float16
    assert cell.add_flags(fp16=False).auto_cast_inputs((torch.ones(1),))[0].dtype == torch.float32
    with pytest.raises(TypeError, match="`fp16` is 1"):
        cell.add_flags(fp16=1)


@about("Cell.add_flags_recursive")
def test_flags_reach_all_cells_below() -> None:
    net = Net()
    assert net.add_flags_recursive(kind="a") is net
    assert (net.kind, net.up.kind, net.relu.get_flags()) == ("a", "a", {"kind": "a"})
    assert not hasattr(net.down, "kind")
    assert net.get_flags() is not net.get_flags()


@about("Cell.set_train")
def test_set_train_sets_mode_and_phase_of_all() -> None:
    net = Net()
    assert (net.phase, net.set_train(False).phase) == ("train", "predict")
    assert not any(module.training for module in net.modules())
    net.phase = "save"
    assert net.phase == "save"
    assert net.set_train().phase == "train"
    with pytest.raises(TypeError, match="`mode` is 'yes'"):
        net.set_train("yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`phase` is 1"):
        net.phase = 1  # type: ignore[assignment]


@about("Cell.set_grad")
def test_set_grad_false_notes_nothing_for_backward() -> None:
    net, x = Net(), torch.ones(1, 2)
    assert net.requires_grad is False
    assert net(x).requires_grad
    assert net.set_grad() is net
    assert (net.requires_grad, net(x).requires_grad) == (True, True)
    assert not net.set_grad(False)(x).requires_grad
    assert net.set_grad()(x).requires_grad
    with pytest.raises(TypeError, match="`requires_grad` is None"):
        net.set_grad(None)  # type: ignore[arg-type]


@about("Cell.set_broadcast_flag")
def test_set_broadcast_flag_reaches_all_cells() -> None:
    net = Net()
    assert net.set_broadcast_flag() is net
    assert net.up.broadcast_flag is True
    assert net.set_broadcast_flag(False).get_flags() == {"broadcast_flag": False}


@about("Cell.set_boost", "Cell.set_boost ValueError")
def test_set_boost_knows_one_algorithm_and_lists_it() -> None:
    net = Net()
    assert net.set_boost("less_bn") is net
    assert net.up.less_bn is True
    with pytest.raises(ValueError, match=r"no algorithm 'more_bn'\n.*`less_bn`"):
        net.set_boost("more_bn")


@about("Cell.bprop_debug")
def test_bprop_is_the_backward_and_bprop_debug_compares_what_it_returns() -> None:
    class Double(nn.Cell):
        def construct(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return 2 * x, x + y

        def bprop(self, x: Tensor, y: Tensor, out: Any, dout: Any) -> Any:
            return 10 * dout[0], (dout[1].sum() if wrong else dout[1])

    wrong, cell = False, Double()
    x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    assert [out.tolist() for out in cell(x, y)] == [[2.0, 2.0], [1.0, 1.0]]
    grads = torch.autograd.grad(cell(x, y=y), (x, y), (torch.ones(2), torch.ones(2)))
    assert [grad.tolist() for grad in grads] == [[10.0, 10.0], [1.0, 1.0]]
    assert cell.bprop_debug is False
    cell.bprop_debug, wrong = True, True
    with pytest.raises(ValueError, match=r"gradient 1 of `bprop` of Double is \[\]"):
        torch.autograd.grad(cell(x, y), (x, y), (torch.ones(2), torch.ones(2)))
    with pytest.raises(TypeError, match="`bprop_debug` is 1"):
        cell.bprop_debug = 1  # type: ignore[assignment]


@about("Cell.extend_repr")
def test_extend_repr_is_printed_between_the_brackets() -> None:
    class Named(nn.Cell):
        def extend_repr(self) -> str:
            return "size=3"

    class NamedDense(nn.Dense):
        def extend_repr(self) -> str:
            return "mine"

    assert (repr(Named()), repr(NamedDense(1, 1))) == ("Named(size=3)", "NamedDense(mine)")
    assert nn.Cell().extend_repr() == ""
    assert nn.Dense(1, 2).extend_repr() == "in_features=1, out_features=2, bias=True"


# - Calls


@about("Cell.run_construct")
def test_run_construct_runs_it_without_hooks() -> None:
    net, x = Net(), torch.ones(1, 2)
    wanted = net(x)
    net.register_forward_hook(lambda cell, inputs, out: out * 0)
    assert torch.equal(net.run_construct((x,), {}), wanted)
    assert torch.equal(net.run_construct((), {"x": x}), wanted)


def test_construct_of_a_layers_subclass_is_what_runs() -> None:
    class Shifted(nn.Dense):
        def construct(self, x: Tensor) -> Tensor:
            return super().construct(x) + 1

    cell, x = Shifted(2, 2), torch.ones(1, 2)
    wanted = torch.nn.functional.linear(x, cell.weight, cell.bias) + 1
    assert torch.equal(cell(x), wanted)
    assert torch.equal(cell.construct(x), wanted)


@about("Cell.cast_inputs", "Cell.auto_cast_inputs", "Cell.cast_param")
def test_casts_change_what_is_of_floating_point() -> None:
    cell, x = nn.Cell(), torch.ones(1)
    number = torch.ones(1, dtype=torch.int64)
    out = cell.cast_inputs((x, [number, {"k": x}], "s"), torch.float16)
    assert (out[0].dtype, out[1][0].dtype, out[1][1]["k"].dtype) == (
        torch.float16,
        torch.int64,
        torch.float16,
    )
    with pytest.raises(TypeError, match="`inputs` is a list"):
        cell.cast_inputs([x], torch.float16)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`dst_type` is 'f16'"):
        cell.cast_inputs((x,), "f16")  # type: ignore[arg-type]
    assert cell.auto_cast_inputs((x,)) == (x,)
    weight = Parameter(x)
    assert cell.cast_param(weight) is weight
    cell.to_float(torch.bfloat16)
    assert cell.auto_cast_inputs((x,))[0].dtype == cell.cast_param(weight).dtype == torch.bfloat16


@about("Cell.to_float ValueError")
def test_to_float_knows_three_types() -> None:
    for wrong in (torch.float64, torch.int32, "float16"):
        with pytest.raises(ValueError, match="a cell cannot run in"):
            nn.Cell().to_float(wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_cast_cell_is_copied_pickled_and_planned() -> None:
    net, x = Net().to_float(torch.bfloat16), torch.ones(2, 2)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(twin(x), net(x))
        assert twin.up.forward.module is twin.up
    plan = dc.plan(net, x, "distcell: 1\nmesh: {dp: 2}\ninputs: {x: [dp]}", ranks=2)
    graph = plan.planned.plan.graph
    assert {graph.values[out.value].dtype for out in graph.outputs if out.kind == "output"} == {
        "bf16"
    }


@about(
    "Cell.register_forward_hook TypeError",
    "Cell.register_forward_pre_hook TypeError",
    "Cell.register_backward_hook TypeError",
)
def test_a_hook_is_a_function() -> None:
    cell = nn.Cell()
    for register in (
        cell.register_forward_hook,
        cell.register_forward_pre_hook,
        cell.register_backward_hook,
    ):
        with pytest.raises(TypeError, match="`hook_fn` is a str, not a function"):
            register("print")  # type: ignore[operator]
        with pytest.raises(TypeError, match="`hook_fn` is a NoneType"):
            register()  # type: ignore[operator]
        with pytest.raises(TypeError, match="both `hook` and `hook_fn`"):
            register(print, hook_fn=print)  # type: ignore[operator]


def test_the_two_orders_of_gradients_in_a_backward_hook() -> None:
    class Triple(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return 3 * x

    cell, x = Triple(), torch.ones(1, requires_grad=True)
    cell.register_backward_hook(lambda cell, of_in, of_out: seen.append((*of_in, *of_out)))
    seen: list[tuple[Tensor, ...]] = []
    handle = cell.register_backward_hook(hook_fn=lambda cell, come, go: (go[0] * 5, come)[:1])
    assert torch.autograd.grad(cell(x), x)[0].item() == 15.0
    assert [[g.item() for g in call] for call in seen] == [[3.0, 1.0]]
    handle.remove()
    assert torch.autograd.grad(cell(x), x)[0].item() == 3.0
    assert cell.cell_id == f"Triple({id(cell)})"


# - Children


@about("Cell.cells", "Cell.name_cells")
def test_cells_are_the_immediate_children() -> None:
    net = Net()
    assert list(net.cells()) == [net.up, net.relu, net.down]
    assert net.name_cells() == OrderedDict(up=net.up, relu=net.relu, down=net.down)


@about(
    "Cell.insert_child_to_cell",
    "Cell.insert_child_to_cell KeyError",
    "Cell.insert_child_to_cell TypeError",
)
def test_a_child_is_inserted_under_a_free_name() -> None:
    net = Net()
    net.insert_child_to_cell("head", nn.Dense(2, 1))
    assert net.head.weight.name == "head.weight"
    for name in ("head", "up", "", "a.b", "construct"):
        with pytest.raises(KeyError, match=r"empty|has a dot|has an attribute"):
            net.insert_child_to_cell(name, nn.ReLU())
    with pytest.raises(TypeError, match="child `other` is a builtin_function"):
        net.insert_child_to_cell("other", torch.relu_)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the name of a child is a int"):
        net.insert_child_to_cell(1, nn.ReLU())  # type: ignore[arg-type]


def test_a_child_cannot_take_the_name_of_a_method() -> None:
    net = nn.Cell()
    with pytest.raises(KeyError, match="`cells` is a name of Cell itself"):
        net.cells = nn.CellList([nn.ReLU()])  # type: ignore[assignment,method-assign]


def test_a_child_assigned_before_init_is_an_error() -> None:
    class Early(nn.Cell):
        def __init__(self) -> None:
            self.relu = nn.ReLU()

    with pytest.raises(AttributeError, match="before Module"):
        Early()


@about("Cell.param_prefix", "Cell.update_cell_prefix")
def test_prefixes_are_paths() -> None:
    inner = Net()
    outer = nn.SequentialCell(inner)
    assert (outer.param_prefix, inner.param_prefix, inner.up.param_prefix) == ("", "0", "0.up")
    inner.update_cell_prefix()
    assert (inner.param_prefix, inner.up.param_prefix) == ("", "up")
    outer.update_cell_prefix()
    assert inner.up.param_prefix == "0.up"


@about("Cell.generate_scope", "Cell.get_scope")
def test_scopes_name_attribute_and_class() -> None:
    outer = nn.SequentialCell(Net())
    assert outer.get_scope() == ""
    outer.generate_scope()
    assert outer.get_scope() == "Default"
    assert outer[0].up.get_scope() == "Default/0-Net/up-Dense"


@about("Cell.update_cell_type")
def test_a_cell_type_is_one_of_two() -> None:
    net = Net()
    assert net.cell_type is None
    assert net.update_cell_type("second-order").cell_type == "second-order"
    with pytest.raises(ValueError, match="no cell type 'quantum'"):
        net.update_cell_type("quantum")


# - Parameters


@about(
    "Cell.insert_param_to_cell",
    "Cell.insert_param_to_cell KeyError",
    "Cell.insert_param_to_cell TypeError",
)
def test_a_parameter_is_inserted_under_a_free_name() -> None:
    net, weight = Net(), torch.nn.Parameter(torch.ones(1))
    net.insert_param_to_cell("scale", weight)
    assert net.scale is weight
    assert isinstance(weight, Parameter)
    for name in ("scale", "up", "", "a.b"):
        with pytest.raises(KeyError, match=r"empty|has a dot|has an attribute"):
            net.insert_param_to_cell(name, Parameter(torch.ones(1)))
    net.insert_param_to_cell("a.b", Parameter(torch.ones(1)), check_name_contain_dot=False)
    assert [name for name, _ in net.named_parameters()][:2] == ["scale", "a.b"]
    with pytest.raises(TypeError, match="`other` is a Tensor"):
        net.insert_param_to_cell("other", torch.ones(1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the name of a parameter is a int"):
        net.insert_param_to_cell(1, weight)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="comes before the first parameter"):
        nn.Cell.__new__(nn.Cell).insert_param_to_cell("scale", weight)


@about("Cell.check_names")
def test_two_parameters_of_one_name_are_an_error() -> None:
    net = nn.Cell(auto_prefix=False)
    net.a, net.b = nn.Dense(1, 1), nn.Dense(1, 1)
    with pytest.raises(ValueError, match=r"the name `weight`\n.*weight, bias"):
        net.check_names()
    with pytest.raises(ValueError, match="the name `weight`"):
        net.compile(torch.ones(1, 1))
    Net().check_names()
    net.b = net.a
    net.check_names()


@about("Cell.parameters_dict")
def test_parameters_come_by_name() -> None:
    net = Net()
    found = net.parameters_dict()
    assert isinstance(found, OrderedDict)
    assert list(found) == NAMES
    assert found["up.weight"] is net.up.weight
    assert net.parameters_dict(recurse=False) == {}


@about("Cell.parameters_broadcast_dict")
def test_what_differs_by_rank_is_not_broadcast() -> None:
    net = Net()
    assert list(net.parameters_broadcast_dict() or ()) == NAMES
    net.up.bias.layerwise_parallel = True
    assert list(net.parameters_broadcast_dict() or ()) == [n for n in NAMES if n != "up.bias"]
    assert net.parameters_broadcast_dict(recurse=False) is None


@about("Cell.update_parameters_name")
def test_a_prefix_stays_before_the_names() -> None:
    net = Net()
    net.update_parameters_name("teacher.")
    assert [p.name for p in net.trainable_params()] == [f"teacher.{name}" for name in NAMES]
    outer = nn.SequentialCell(net)
    assert outer.trainable_params()[0].name == "teacher.0.up.weight"
    net.update_parameters_name("old.", recurse=False)
    assert net.trainable_params()[0].name == "teacher.up.weight"
    assert [name for name, _ in net.named_parameters()] == NAMES
    with pytest.raises(TypeError, match="`prefix` is 1"):
        net.update_parameters_name(1)  # type: ignore[arg-type]


def test_a_parameter_keeps_the_name_that_it_was_given() -> None:
    net = nn.Cell()
    net.inner = nn.Cell()
    net.inner.w = Parameter(torch.ones(1), name="scale")
    assert [p.name for p in net.trainable_params()] == ["inner.scale"]
    net.inner.w.name = "mine"
    assert [p.name for p in net.trainable_params()] == ["mine"]
    assert str(Parameter(torch.ones(2, dtype=torch.bfloat16))) == (
        "Parameter (name=Parameter, shape=(2,), dtype=BFloat16, requires_grad=True)"
    )


@about("Cell.init_parameters_data")
def test_lazy_parameters_get_their_values_in_place() -> None:
    torch.manual_seed(0)
    wanted = nn.Dense(64, 64)
    torch.manual_seed(0)
    with dc.lazy_init():
        net = nn.Dense(64, 64)
    assert net.weight.isnan().any()
    found = net.init_parameters_data(auto_parallel_mode=True)
    assert net.weight.isnan().any()
    found = net.init_parameters_data()
    assert all(old is new for old, new in found.items())
    assert torch.equal(net.weight, wanted.weight)
