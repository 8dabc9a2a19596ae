"""What `import distcell as dc` offers."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

import distcell as dc


@pytest.mark.parametrize(
    "name",
    ["clip_grad_norm_", "compile_step", "local_state_dict", "plan", "simulate", "lazy_init"],
)
def test_late_names_are_functions(name: str) -> None:
    assert callable(getattr(dc, name))


def test_a_subpackage_does_not_take_the_name_of_a_function() -> None:
    importlib.import_module("distcell.simulate.values")
    assert dc.simulate is importlib.import_module("distcell.testing").simulate
    importlib.import_module("distcell.layout")
    assert dc.layout is importlib.import_module("distcell.parameter").layout


def test_an_unknown_name_is_an_error_with_a_proposal() -> None:
    with pytest.raises(AttributeError, match="did you mean `parallelize`"):
        dc.paralelize


@pytest.mark.slow
def test_importing_distcell_does_not_import_the_engine_nor_pytest_nor_mpi() -> None:
    code = "import sys, distcell; print([m for m in ('distcell.engine', 'pytest', 'mpi4py', 'rich')"
    done = subprocess.run(  # noqa: PLW1510
        [sys.executable, "-c", f"{code} if m in sys.modules])"], capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_the_table_of_methods_is_what_its_script_writes() -> None:
    path = Path(__file__).parents[2] / "scripts" / "write_cell_table"
    loader = SourceFileLoader("write_cell_table", str(path))
    spec = spec_from_loader("write_cell_table", loader)
    assert spec is not None
    script = module_from_spec(spec)
    # no cache of its code beside a script that is not shipped
    exec(loader.source_to_code(path.read_bytes(), str(path)), vars(script))
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.page(text) == text
    assert set(script.DIFFERS) <= script.names()


def test_the_package_lists_its_names() -> None:
    import distcell

    assert {"Cell", "Model", "parallelize", "plan", "whole_tensor", "nn"} <= set(distcell.__all__)
    assert all(hasattr(distcell, name) for name in distcell.__all__)
    assert len(set(distcell.__all__)) == len(distcell.__all__)
