"""Every public name of the seed documents, and every error that they document, has a test."""

from __future__ import annotations

import ast
from pathlib import Path

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
Cell cells_and_names get_parameters parameters_and_names register_backward_hook
register_forward_hook register_forward_pre_hook set_data_parallel set_inputs shard to_float
untrainable_params
""".split()


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
