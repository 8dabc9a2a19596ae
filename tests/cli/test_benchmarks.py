"""The command of the benchmarks, on a tiny model: what it prints and writes, not how fast it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distcell.runtime.mpi_installation import find_mpirun

ROOT = Path(__file__).parents[2]
PATIENCE_S = 240

needs_mpi = pytest.mark.skipif(find_mpirun() is None, reason="no mpirun")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(PATIENCE_S)]


def rows(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    """What the command writes; its table must name every case."""
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks", *arguments, "--small", "--pairs", "1"]
    done = subprocess.run(
        [*command, "--json", str(file)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(file.read_text())
    for row in found:
        assert {"case", "ours", "peer", "ratio", "low", "high"} <= set(row)
        assert 0 < row["low"] <= row["ratio"] <= row["high"]
        assert row["case"] in done.stdout
    return found


@needs_mpi
def test_step_compares_each_case_with_its_peer_at_both_batch_sizes(tmp_path: Path) -> None:
    found = rows(tmp_path, "step", "--case", "tp-gpt-gloo", "--case", "dp-gpt")
    named = [(row["case"], row["peer"], row["batch"]) for row in found]
    cases = [("tp-gpt-gloo", "dtensor-gloo"), ("dp-gpt", "ddp-gloo")]
    assert named == [(case, peer, batch) for batch in (2, 8) for case, peer in cases]


@needs_mpi
def test_collectives_compares_each_kind_with_gloo_and_with_a_copy(tmp_path: Path) -> None:
    found = rows(tmp_path, "collectives", "--ranks", "2")
    named = {(row["case"], row["peer"]) for row in found}
    kinds = ("all_reduce", "all_reduce_owned", "all_gather", "reduce_scatter")
    sizes = ("4KiB", "64KiB")
    peers = ("gloo", "memcpy")
    assert named == {(f"{k}/{s}/2", p) for k in kinds for s in sizes for p in peers}


@needs_mpi
def test_plan_times_planning_and_the_start_of_ranks(tmp_path: Path) -> None:
    found = rows(tmp_path, "plan", "--ranks", "2")
    assert [row["case"] for row in found] == ["plan/2-layers/2", "start/2-layers/2"]


def test_simulate_compares_with_local_tensor_mode_and_with_one_device(tmp_path: Path) -> None:
    found = rows(tmp_path, "simulate", "--ranks", "2")
    assert [row["peer"] for row in found] == ["local-tensor", "eager"]
    assert {row["case"] for row in found} == {"simulate/2-layers/2"}


def test_cell_compares_with_torch_the_same_layers_made_and_called(tmp_path: Path) -> None:
    found = rows(tmp_path, "cell")
    named = [(row["case"], row["ours"], row["peer"], row["limit"]) for row in found]
    kinds = ("Cell", "nn.Dense")
    cases = ("cell-construct", "cell-call")
    assert named == [(case, kind, "torch", 1.1) for case in cases for kind in kinds]


def test_a_command_that_is_not_known_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "stepp"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 2
    assert "stepp" in done.stderr


@needs_mpi
def test_ddp_compares_the_backend_with_gloo(tmp_path: Path) -> None:
    found = rows(tmp_path, "ddp", "--ranks", "2")
    named = [(row["case"], row["ours"], row["peer"]) for row in found]
    assert named == [("ddp-mlp", "mpi4py", "gloo"), ("ddp-gpt", "mpi4py", "gloo")]
