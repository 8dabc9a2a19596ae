"""README and documentation: every block runs, every list is complete, the site builds."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import distcell as dc
from distcell import errors, nn
from distcell.launch import command_line as launch_flags
from distcell.layout import Layout
from distcell.report import command_line as report_flags
from distcell.runtime.mpi_installation import find_mpirun
from distcell.strategy import schema
from tests.docs.blocks import ROOT, blocks_of, run_command, run_page, same_output

DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "launcher" / "README.md",
    *sorted((ROOT / "examples").glob("*.md")),
    *sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts),
]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_block_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    shutil.copy(ROOT / "train.py", tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    failures = run_page(page, tmp_path)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_what_is_not_run_says_why(page: Path) -> None:
    for block in blocks_of(page):
        assert block.kind, f"{block.place}: a block without a language"
        assert block.kind != "console" or block.text.startswith("$ "), block.place


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, _ = target.partition("#")
        if path and "://" not in path:
            assert (page.parent / path).exists(), f"{_name(page)} links to {target}"


def test_an_ellipsis_stands_for_anything_and_a_speed_for_any_speed() -> None:
    assert same_output("a\n...\nz   1 tokens/s", "a\nb\nc\nz   9,999 tokens/s\n")
    assert not same_output("a\nz", "a\nb\nz")


def test_the_readme_is_short_and_begins_with_the_two_commands() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 200
    head = "\n".join(lines[:25])
    assert "scripts/quickstart" in head
    assert "mpirun -n 8 python -m distcell.launch train.py" in head


@pytest.mark.slow
@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun")
def test_the_losses_at_the_top_of_the_readme_are_those_of_eight_ranks(tmp_path: Path) -> None:
    shutil.copy(ROOT / "train.py", tmp_path)
    top = next(b for b in blocks_of(ROOT / "README.md") if "/400" in b.text)
    command = re.search(r"mpirun .*", top.text)
    assert command is not None
    done = run_command(f"{command[0]} --steps 20", tmp_path)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    shown, found = (
        dict(re.findall(r"^step (\d+)/.*loss (\S+)", t, re.M)) for t in (top.text, done.stdout)
    )
    assert found == {step: shown[step] for step in ("1", "20")}


def test_the_picture_shows_the_layouts_of_the_plan() -> None:
    class Mlp(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.relu, self.down = nn.Dense(64, 256), nn.ReLU(), nn.Dense(256, 64)

        def construct(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.relu(self.up(x)))

    strategy = "distcell: 1\nmesh: {dp: 2, tp: 4}\ninputs: {x: [dp]}\n"
    strategy += "cells: {up: {params: {weight: [tp, _]}}}"
    found = dc.plan(Mlp(), torch.rand(16, 64), strategy, ranks=8)
    picture = (DOCS / "_static" / "mlp.svg").read_text(encoding="utf-8")
    shown = re.findall(r">f32(\[.*?\])<", picture)
    paths = ("up.weight", "down.weight", "x", "up", "down")
    layouts = [found.layout(path) for path in paths]
    assert shown == [str(Layout.of(one.shape)) for one in layouts] + [str(one) for one in layouts]


def test_the_reference_names_every_key_of_a_strategy() -> None:
    text = (DOCS / "reference" / "strategy.md").read_text(encoding="utf-8")
    for key in (*schema._TOP_KEYS, *schema._CELL_KEYS):
        assert f"`{key}`" in text, key


def test_the_reference_names_every_flag() -> None:
    text = (DOCS / "reference" / "commands.md").read_text(encoding="utf-8")
    flags = {flag for each in report_flags.flags().values() for flag in each}
    for flag in (flags | set(launch_flags.flags())) - {"-h"}:
        assert re.search(rf"`{flag}[` ]", text), flag


def test_the_reference_names_every_error() -> None:
    text = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    for name in errors.__all__:
        if name.endswith("Error"):
            assert f"`{name}`" in text, name


def test_the_reference_names_everything_public() -> None:
    text = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    helpers = {"Any", "ModuleType", "TYPE_CHECKING", "annotations", "import_module"}
    public = {name for name in vars(dc) if not name.startswith("_")} - helpers
    modules = {name for name in public if isinstance(getattr(dc, name), ModuleType)}
    for name in {*public, *dc._LATE} - modules:
        assert name in text, name


def _modules() -> list[str]:
    found = pkgutil.walk_packages(dc.__path__, "distcell.")
    return sorted(info.name for info in found if not info.name.endswith("__main__"))


@pytest.mark.slow
def test_the_examples_in_docstrings_are_true() -> None:
    failed = []
    for name in _modules():
        module = importlib.import_module(name)
        said: list[str] = []
        runner = doctest.DocTestRunner(verbose=False)
        for test in doctest.DocTestFinder().find(module, name):
            runner.run(test, out=said.append)
        if runner.failures:
            failed.append(f"{name}\n{''.join(said)}")
    assert not failed, "\n".join(failed)


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("sphinx", "myst_parser", "furo")),
    reason="needs the extra [docs]",
)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", DOCS, tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
