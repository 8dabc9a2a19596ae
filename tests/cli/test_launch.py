"""The launcher as a user starts it: real processes, their output and exit codes."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from distcell.runtime.mpi_installation import find_mpirun

ROOT = Path(__file__).parents[2]
LAUNCH = [sys.executable, "-m", "distcell.launch"]
MPIRUN = find_mpirun()
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
FAULT_S = 10
PATIENCE_S = 90

needs_mpi = pytest.mark.skipif(MPIRUN is None, reason="no mpirun")
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

FAILS = """
import os, sys, time
import torch
import distcell
from distcell.errors import DataError
from distcell.mesh import Mesh
from distcell.runtime import world
how = sys.argv[1]
here = world.current_world()
c = world.collectives_for(Mesh((("dp", here.size),)))
c.all_reduce(torch.ones(2), ("dp",), label="first")
sys.stdout.write(f"MYPID {os.getpid()}\\n")
sys.stdout.flush()
c.barrier()
if here.rank == 1:
    if how == "raise":
        raise ValueError("boom")
    if how == "exit":
        sys.exit(3)
    if how == "kill":
        os.kill(os.getpid(), 9)
    if how == "stop":
        time.sleep(3600)
if how == "error":
    raise DataError("the same on all ranks", hint="mend it")
if how != "return" or here.rank != 1:
    c.all_reduce(torch.ones(2), ("dp",), label="blocks.1.mlp")
"""


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    (tmp_path / "says.py").write_text(SAYS_ITS_RANK)
    (tmp_path / "fails.py").write_text(FAILS)
    (tmp_path / "neighbour.py").write_text("VALUE = 1\n")
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    left_out = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PMI") and k not in left_out}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept | {"PYTHONPATH": path} | more


def run(command: Sequence[str], cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(command),
        cwd=cwd,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def said(done: subprocess.CompletedProcess[str]) -> list[dict]:
    import json

    assert done.returncode == 0, done.stderr
    found = [json.loads(text) for text in re.findall(r"SAYS(\{.*?\})(?=\s|SAYS|$)", done.stdout)]
    return sorted(found, key=lambda entry: entry["rank"])


def all_gone(pids: Sequence[int], within: float) -> bool:
    """Whether the processes end in time; waits on the processes themselves."""
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended = select.select([fd], [], [], within)[0]
        os.close(fd)
        if not ended:
            return False
    return True


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


BACKENDS = [pytest.param("mpi", marks=needs_mpi, id="over-mpi"), "gloo"]


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(FAILS.splitlines(), start=1) if text in line)


def failing(scripts: Path, backend: str, how: str, *flags: str):
    command = [*LAUNCH, "-n", "3", "--backend", backend, *flags, "fails.py", how]
    done = run(command, scripts)
    pids = [int(pid) for pid in re.findall(r"MYPID (\d+)", done.stdout)]
    assert len(pids) == 3, done.stderr
    assert all_gone(pids, FAULT_S)
    return done


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_raises_says_so_first_and_all_end(scripts, backend):
    done = failing(scripts, backend, "raise")
    assert done.returncode == 1
    assert done.stderr.startswith("rank 1 failed:\nTraceback (most recent call last):\n")
    first = done.stderr.split("failed too")[0]
    assert f'fails.py", line {line_of("raise ValueError")}, in <module>' in first
    assert "ValueError: boom" in first
    assert "distcell/launch" not in first


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_exit_code_of_the_script_is_the_jobs(scripts, backend):
    done = failing(scripts, backend, "exit")
    assert done.returncode == 3
    assert "rank 1 left the script with exit code 3" in done.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_is_killed_takes_the_others_with_it(scripts, backend):
    done = failing(scripts, backend, "kill")
    assert done.returncode not in (0, 1)
    if backend == "gloo":
        assert "rank 1 was ended by SIGKILL" in done.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_that_all_ranks_meet_is_said_once_without_a_traceback(scripts, backend):
    done = failing(scripts, backend, "error")
    assert done.returncode == 2
    assert done.stderr.count("error: the same on all ranks\n  = hint: mend it\n") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_does_not_come_to_a_collective_is_named(scripts, backend):
    done = failing(scripts, backend, "stop", "--stall-after", "1")
    assert done.returncode == 2
    assert "error: a collective did not finish within 1 s" in done.stderr
    assert re.search(
        r"rank 0 waits for \d s in #3 all_reduce over dp, 8 bytes  blocks.1.mlp", done.stderr
    )
    place = rf"fails\.py:{line_of('time.sleep')} in <module>"
    assert re.search(f"rank 1 is in no collective, but at .*{place}", done.stderr)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_returns_while_others_wait_is_named(scripts, backend):
    done = failing(scripts, backend, "return", "--stall-after", "1")
    assert done.returncode == 2
    assert "rank 1 has left the script" in done.stderr


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_all_ranks(scripts, backend, number):
    command = [*LAUNCH, "-n", "2", "--backend", backend, "fails.py", "stop"]
    with subprocess.Popen(
        command, cwd=scripts, env=environment(), stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        pids = [int(job.stdout.readline().split()[1]) for _ in range(2)]
        job.send_signal(number)
        assert job.wait(FAULT_S) != 0
    assert all_gone(pids, FAULT_S)


@needs_mpi
def test_ranks_that_were_started_differently_end_within_seconds(scripts):
    one, two = ["-n", "1", *LAUNCH, "says.py"], ["-n", "1", *LAUNCH, "fails.py"]
    done = run([str(MPIRUN), *one, ":", *two], scripts)
    assert done.returncode == 2
    assert done.stderr.count("error: the ranks were started with different scripts") == 1
    assert re.search(r"rank 0: .*says.py\n.*rank 1: .*fails.py", done.stderr)


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
