"""Every public name has a docstring with an example, which the doctests run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

import distcell as dc
from distcell import nn, ops

OF_CLASS = {"construct", "forward"}
"""What the example of a layer's class calls."""


def _public() -> Iterator[tuple[str, object]]:
    """Names of the three modules that users import, and the methods of the classes among them."""
    late = [
        "clip_grad_norm_",
        "compile_step",
        "local_state_dict",
        "plan",
        "simulate",
        "whole_tensor",
    ]
    for module, names in ((dc, [*vars(dc), *late]), (nn, vars(nn)), (ops, vars(ops))):
        for name in list(names):
            item = getattr(module, name)
            ours = str(getattr(item, "__module__", "")).startswith("distcell")
            if not name.startswith("_") and callable(item) and ours:
                yield f"{module.__name__}.{name}", item


def _methods(kind: type) -> Iterator[tuple[str, object]]:
    for base in kind.__mro__:
        if not base.__module__.startswith("distcell"):
            continue
        for name, item in vars(base).items():
            skipped = name.startswith("_") or (name in OF_CLASS and base is not nn.Cell)
            if inspect.isfunction(item) and not skipped:
                yield name, item


PUBLIC = dict(_public())


def test_the_public_names_are_found() -> None:
    wanted = {"distcell.Cell", "distcell.plan", "distcell.nn.Dense", "distcell.ops.ReLU"}
    assert wanted <= set(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_it_has_an_example(name: str) -> None:
    item = PUBLIC[name]
    items = {name: item}
    if isinstance(item, type) and not issubclass(item, BaseException):
        items |= {f"{name}.{method}": each for method, each in _methods(item)}
    # of a class its own: an inherited docstring is about something else
    docs = {
        n: vars(i).get("__doc__") if isinstance(i, type) else i.__doc__ for n, i in items.items()
    }
    assert [n for n, doc in docs.items() if ">>>" not in (doc or "")] == []
