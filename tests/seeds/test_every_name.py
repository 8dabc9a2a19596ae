"""Every public name of the seed documents, and every error and example in them, has a test."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch

from distcell import nn

# What the pages on MindSpore's Cell, on MegEngine's Module, and on torch's buffers name.
CELL = """
add_flags add_flags_recursive auto_cast_inputs auto_parallel_compile_and_run bprop_debug cast_inputs
cast_param cells cells_and_names check_names compile compile_and_run construct exec_checkpoint_graph
extend_repr generate_scope get_flags get_func_graph_proto get_inputs get_parameters get_scope
infer_param_pipeline_stage init_parameters_data insert_child_to_cell insert_param_to_cell
load_parameter_slice name_cells param_prefix parameter_layout_dict parameters_and_names
parameters_broadcast_dict parameters_dict recompute register_backward_hook register_forward_hook
register_forward_pre_hook remove_redundant_parameters run_construct set_auto_parallel set_boost
set_broadcast_flag set_comm_fusion set_data_parallel set_grad set_inputs
set_parallel_input_with_inputs set_param_fl set_param_ps set_train shard to_float trainable_params
untrainable_params update_cell_prefix update_cell_type update_parameters_name auto_prefix flags
""".split()
MODULE = """
name apply buffers load_state_dict named_buffers named_children named_modules named_parameters
named_tensors parameters register_forward_hook register_forward_pre_hook replace_param tensors train
""".split()
TORCH = ["buffers", "named_buffers"]
ERRORS = [
    "Cell.infer_param_pipeline_stage RuntimeError",
    "Cell.insert_child_to_cell KeyError",
    "Cell.insert_child_to_cell TypeError",
    "Cell.insert_param_to_cell KeyError",
    "Cell.insert_param_to_cell TypeError",
    "Cell.register_backward_hook TypeError",
    "Cell.register_forward_hook TypeError",
    "Cell.register_forward_pre_hook TypeError",
    "Cell.set_boost ValueError",
    "Cell.to_float ValueError",
]
EXAMPLES = """
Cell buffers cells_and_names get_parameters load_state_dict parameters_and_names
register_backward_hook register_forward_hook register_forward_pre_hook set_data_parallel set_inputs
shard to_float untrainable_params
""".split()
# As the pages write them, without `self`.
MINDSPORE_SIGNATURES = """
add_flags(**flags)
add_flags_recursive(**flags)
auto_cast_inputs(inputs)
cast_inputs(inputs, dst_type)
cast_param(param)
cells_and_names(cells=None, name_prefix='')
compile(*inputs)
compile_and_run(*inputs)
construct(*inputs, **kwargs)
get_parameters(expand=True)
init_parameters_data(auto_parallel_mode=False)
insert_child_to_cell(child_name, child_cell)
insert_param_to_cell(param_name, param, check_name_contain_dot=True)
load_parameter_slice(params)
parameters_and_names(name_prefix='', expand=True)
parameters_broadcast_dict(recurse=True)
parameters_dict(recurse=True)
recompute(**kwargs)
register_backward_hook(hook_fn)
register_forward_hook(hook_fn)
register_forward_pre_hook(hook_fn)
run_construct(cast_inputs, kwargs)
set_boost(boost_type)
set_broadcast_flag(mode=True)
set_comm_fusion(fusion_type, recurse=True)
set_grad(requires_grad=True)
set_inputs(*inputs)
set_parallel_input_with_inputs(*inputs)
set_param_fl(push_to_server=False, pull_from_server=False, requires_aggr=True)
set_param_ps(recurse=True, init_in_server=False)
set_train(mode=True)
shard(in_strategy, out_strategy, device='Ascend', level=0)
to_float(dst_type)
trainable_params(recurse=True)
untrainable_params(recurse=True)
update_cell_type(cell_type)
update_parameters_name(prefix='', recurse=True)
""".strip().splitlines()
MEGENGINE_SIGNATURES = """
apply(fn)
buffers(recursive=True)
load_state_dict(state_dict, strict=True)
named_buffers(prefix=None, recursive=True)
named_modules(prefix=None)
named_parameters(prefix=None, recursive=True)
named_tensors(prefix=None, recursive=True)
parameters(recursive=True)
register_forward_hook(hook)
register_forward_pre_hook(hook)
replace_param(params, start_pos, seen=None)
tensors(recursive=True)
train(mode=True, recursive=True)
""".strip().splitlines()


def _marks() -> set[str]:
    found: set[str] = set()
    for file in Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for mark in node.decorator_list:
                    if isinstance(mark, ast.Call) and getattr(mark.func, "id", "") == "about":
                        found |= {str(ast.literal_eval(arg)) for arg in mark.args}
    return found


def _wanted() -> set[str]:
    names = [("Cell", CELL), ("Module", MODULE), ("torch", TORCH), ("example", EXAMPLES)]
    return {f"{kind}.{name}" for kind, listed in names for name in listed} | set(ERRORS)


def test_every_name_error_and_example_of_the_seeds_has_a_test() -> None:
    assert _wanted() - _marks() == set()


def test_no_test_is_about_a_name_that_no_seed_has() -> None:
    assert _marks() - _wanted() == set()


def test_every_method_of_the_seeds_is_an_attribute_of_cell() -> None:
    arguments = {"auto_prefix", "flags"}
    assert [n for n in {*CELL, *MODULE} - arguments if not hasattr(nn.Cell, n)] == []
    assert issubclass(nn.Cell, torch.nn.Module)


def _parameters(signature: str) -> tuple[str, list[inspect.Parameter]]:
    """The name and the arguments of a signature that is written out."""
    name, _, rest = signature.partition("(")
    function = eval(f"lambda {rest.removesuffix(')')}: None")  # of this file's own lines
    return name, list(inspect.signature(function).parameters.values())


@pytest.mark.parametrize("signature", MINDSPORE_SIGNATURES)
def test_methods_take_mindspores_arguments_in_its_order_with_its_defaults(signature: str) -> None:
    name, wanted = _parameters(signature)
    ours = inspect.signature(getattr(nn.Cell, name)).parameters
    places = [list(ours).index(each.name) for each in wanted if each.name in ours]
    assert places == sorted(places)
    for each in wanted:
        kinds = (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        if each.kind in kinds:
            assert any(own.kind is each.kind for own in ours.values())
        else:
            assert each.name in ours
            if each.default is not each.empty:
                assert ours[each.name].default == each.default


@pytest.mark.parametrize("signature", MEGENGINE_SIGNATURES)
def test_methods_take_megengines_arguments_by_name(signature: str) -> None:
    name, wanted = _parameters(signature)
    assert {each.name for each in wanted} <= set(
        inspect.signature(getattr(nn.Cell, name)).parameters
    )


def test_the_page_on_cell_lists_the_examples_that_are_corrected() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/cell.md").read_text(encoding="utf-8")
    part = page.partition("## Corrections to the originals' examples")[2].partition("\n## ")[0]
    assert "nn.Dense2" in part and "super().__init__()" in part and 'device_target="Ascend"' in part
