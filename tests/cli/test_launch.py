"""The launcher as a user starts it: real processes, their output and exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.cli.jobs import LAUNCH, MPIRUN, TORCHRUN, needs_mpi, run

pytestmark = pytest.mark.slow

SAYS_ITS_RANK = """
import json, os, random, sys
import numpy, torch
import distcell
from distcell.context import launch
from distcell.mesh import Mesh
from distcell.runtime import world
from neighbour import VALUE  # the script's folder is on the path
here = world.current_world()
c = world.collectives_for(Mesh((("dp", here.size),)))
total = c.all_reduce(torch.ones(2), ("dp",)).tolist()
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
found = {
    "rank": here.rank, "size": here.size, "backend": here.backend, "total": total,
    "environ": [name in os.environ for name in names], "ranks": os.environ["RANK"],
    "argv": sys.argv[1:], "name": __name__, "threads": torch.get_num_threads(),
    "draws": [torch.rand(1).item(), numpy.random.rand(), random.random()],
    "mode": launch().mode, "launched": launch().ranks, "strategy": launch().strategy,
}
sys.stdout.write("SAYS" + json.dumps(found) + "\\n")
sys.stdout.flush()
"""


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    (tmp_path / "says.py").write_text(SAYS_ITS_RANK)
    (tmp_path / "other.py").write_text("import distcell\n")
    (tmp_path / "neighbour.py").write_text("VALUE = 1\n")
    return tmp_path


def said(done: subprocess.CompletedProcess[str]) -> list[dict]:
    assert done.returncode == 0, done.stderr
    found = [json.loads(text) for text in re.findall(r"SAYS(\{.*?\})(?=\s|SAYS|$)", done.stdout)]
    return sorted(found, key=lambda entry: entry["rank"])


STARTS = {
    "alone": (LAUNCH, 1, "none"),
    "mpirun": ([str(MPIRUN), "-n", "2", *LAUNCH], 2, "mpi"),
    "-n": ([*LAUNCH, "-n", "2"], 2, "mpi"),
    "-n gloo": ([*LAUNCH, "-n", "2", "--backend", "gloo"], 2, "gloo"),
    "torchrun": ([*TORCHRUN, "distcell.launch"], 2, "gloo"),
}


@pytest.mark.parametrize("how", STARTS)
def test_the_script_runs_on_every_rank_whatever_starts_them(scripts, how):
    if MPIRUN is None and "mpi" in STARTS[how]:
        pytest.skip("no mpirun")
    command, size, backend = STARTS[how]
    found = said(
        run([*command, "--strategy", "data", "--seed", "5", "says.py", "--lr", "1"], scripts)
    )
    assert [entry["rank"] for entry in found] == list(range(size))
    for entry in found:
        assert entry["backend"] == backend
        assert entry["total"] == [size] * 2
        assert all(entry["environ"])
        assert entry["ranks"] == str(entry["rank"])
        assert entry["argv"] == ["--lr", "1"]
        assert entry["name"] == "__main__"
        assert entry["draws"] == found[0]["draws"]
        assert entry["threads"] == max(1, len(os.sched_getaffinity(0)) // size)
        assert (entry["mode"], entry["launched"], entry["strategy"]) == ("ranks", size, "data")


def test_simulated_ranks_are_played_by_one_process(scripts):
    (entry,) = said(run([*LAUNCH, "--simulate", "8", "--threads", "1", "says.py"], scripts))
    assert (entry["mode"], entry["launched"], entry["size"]) == ("simulate", 8, 1)
    assert entry["threads"] == 1


def test_the_same_seed_draws_the_same_and_another_seed_draws_others(scripts):
    first, second, other = (
        said(run([*LAUNCH, "--seed", seed, "says.py"], scripts))[0]["draws"] for seed in "778"
    )
    assert first == second
    assert first != other


@needs_mpi
def test_ranks_that_were_started_differently_end_within_seconds(scripts):
    one, two = ["-n", "1", *LAUNCH, "says.py"], ["-n", "1", *LAUNCH, "other.py"]
    done = run([str(MPIRUN), *one, ":", *two], scripts)
    assert done.returncode == 2
    assert done.stderr.count("error: the ranks were started with different scripts") == 1
    assert re.search(r"rank 0: .*says.py\n.*rank 1: .*other.py", done.stderr)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-n", "0", "says.py"], "`0` is not a number of at least 1"),
        (["--strategie", "data", "says.py"], "no flag `--strategie`"),
        (["sayz.py"], "there is no script `sayz.py`"),
        (["-n", "2", "--strategy", "tensro", "says.py"], "there is no strategy `tensro`"),
    ],
)
def test_a_wrong_command_is_one_error_with_exit_code_2(scripts, flags, message):
    done = run([*LAUNCH, *flags], scripts)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@needs_mpi
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--strategy", "tensro", "says.py"], "there is no strategy `tensro`"),
        (["--simulate", "2", "says.py"], "--simulate plays all ranks in one process"),
        (["-n", "3", "says.py"], "-n 3 asks for other ranks than the 2 of MPICH"),
        (["--backend", "gloo", "says.py"], "MASTER_ADDR and MASTER_PORT not set"),
    ],
)
def test_under_mpirun_one_rank_says_what_is_wrong(scripts, flags, message):
    done = run([str(MPIRUN), "-n", "2", *LAUNCH, *flags], scripts)
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1
    assert message in done.stderr


@needs_mpi
@pytest.mark.parametrize("flags", [[], ["--backend", "mpi"]])
def test_no_mpi_library_is_an_error_that_says_what_to_install(scripts, flags):
    command = [str(MPIRUN), "-n", "2", *LAUNCH, *flags, "says.py"]
    done = run(command, scripts, MPI4PY_LIBMPI=str(scripts / "libmpi.so"))
    assert done.returncode == 2
    assert done.stderr.count("error: no MPI library found") == 1
    assert "pip install 'distcell[mpi]'" in done.stderr


@needs_mpi
def test_without_a_library_the_launcher_takes_gloo_and_says_so(scripts):
    done = run([*LAUNCH, "-n", "2", "says.py"], scripts, MPI4PY_LIBMPI=str(scripts / "libmpi.so"))
    assert {entry["backend"] for entry in said(done)} == {"gloo"}
    assert "no MPI library found; the ranks talk over gloo" in done.stderr


@pytest.mark.skipif(shutil.which("torchrun") is None, reason="no torchrun")
def test_under_torchrun_mpi_is_refused_because_every_rank_would_be_alone(scripts):
    done = run([*TORCHRUN, "distcell.launch", "--backend", "mpi", "says.py"], scripts)
    assert done.returncode != 0
    assert "torchrun started 2 ranks, MPI sees 1" in done.stderr


@needs_mpi
def test_a_watchdog_that_looks_often_does_not_take_a_job_down_at_its_end(scripts):
    (scripts / "empty.py").write_text("import distcell\n")
    done = run([str(MPIRUN), "-n", "2", *LAUNCH, "--stall-after", "0.0005", "empty.py"], scripts)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_port_that_is_taken_is_one_error(scripts):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = run([*LAUNCH, "says.py"], scripts, RANK="0", WORLD_SIZE="2", **where)
    assert done.returncode == 2
    assert f"error: cannot listen at 127.0.0.1:{port}, where the ranks meet\n" in done.stderr
    assert "Traceback" not in done.stderr
