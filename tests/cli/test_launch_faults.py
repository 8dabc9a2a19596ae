"""What happens when a rank fails: the cause is said first, and nothing of the job is left."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.jobs import LAUNCH, MPIRUN, TORCHRUN, all_gone, environment, needs_mpi, run

pytestmark = pytest.mark.slow

FAULT_S = 10

FAILS = """
import os, signal, subprocess, sys, time
import torch
import distcell
from distcell.errors import DataError
from distcell.mesh import Mesh
from distcell.runtime import world
how = sys.argv[1]
here = world.current_world()
c = world.collectives_for(Mesh((("dp", here.size),)))
c.all_reduce(torch.ones(2), ("dp",), label="first")
pids = [os.getpid(), os.getppid()]
if how == "orphan":
    pids.append(subprocess.Popen(["sleep", "3600"]).pid)
lines = open("/proc/self/maps").read().splitlines()
files = {line.split()[5] for line in lines if "/dev/shm/" in line}
sys.stdout.write("".join(f"MYPID {pid}\\n" for pid in pids))
sys.stdout.write("".join(f"MYFILE {file}\\n" for file in files))
sys.stdout.flush()
c.barrier()
if here.rank == 1:
    if how == "raise":
        raise ValueError("boom")
    if how == "exit":
        sys.exit(3)
    if how == "_exit":
        os._exit(3)
    if how in ("kill", "orphan"):
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "stop":
        time.sleep(3600)
    if how == "mismatch":
        c.all_gather(torch.ones(1), ("dp",), 0, [1] * here.size, label="blocks.2.mlp")
if how == "error":
    raise DataError("the same on all ranks", hint="mend it")
if how != "return" or here.rank != 1:
    c.all_reduce(torch.ones(2), ("dp",), label="blocks.1.mlp")
"""

WAITS_CROSSWISE = """
import torch
from distcell.mesh import Mesh
from distcell.runtime import world
here = world.current_world()
c = world.collectives_for(Mesh((("dp", 2), ("tp", 2))))
first, second = (("dp",), ("tp",)) if here.rank in (0, 3) else (("tp",), ("dp",))
c.all_reduce(torch.ones(2), first, label="first")
c.all_reduce(torch.ones(2), second, label="second")
"""

PLANS_FOR_LONG = """
import time
import torch
import distcell as dc
from distcell.engine import state
from distcell.launch_options import launch
slowly = state.plan_graph
def plan_graph(*args, **kwargs):
    deadline = time.monotonic() + 4 * launch().stall_after
    while time.monotonic() < deadline:
        torch.ones(1000).sum()
    return slowly(*args, **kwargs)
state.plan_graph = plan_graph
net = dc.parallelize(torch.nn.Linear(4, 4))
net(torch.ones(4, 4)).sum().backward()
print("planned")
"""

DIES_EARLY = """
import os, sys
from distcell.launch import monitor
from distcell.runtime.rank_environment import find_ranks
monitor.start_rank(find_ranks(os.environ).rank)
from mpi4py import MPI
lines = open("/proc/self/maps").read().splitlines()
files = {line.split()[5] for line in lines if "/dev/shm/mpich_shm_" in line}
sys.stdout.write("".join(f"MYFILE {file}\\n" for file in files))
sys.stdout.flush()
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 1:
    os.kill(os.getpid(), 9)
MPI.COMM_WORLD.Barrier()
"""

# An id of `mpi` alone would be taken for pytest-mpi's mark.
STARTS = {
    "mpirun": [str(MPIRUN), "-n", "3", *LAUNCH],
    "-n": [*LAUNCH, "-n", "3", "--backend", "mpi"],
    "gloo": [*LAUNCH, "-n", "3", "--backend", "gloo"],
}


@pytest.fixture(params=[pytest.param("mpirun", marks=needs_mpi), "gloo"])
def start(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    (tmp_path / "fails.py").write_text(FAILS)
    (tmp_path / "crosswise.py").write_text(WAITS_CROSSWISE)
    (tmp_path / "early.py").write_text(DIES_EARLY)
    (tmp_path / "plans.py").write_text(PLANS_FOR_LONG)
    return tmp_path


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(FAILS.splitlines(), start=1) if text in line)


def failing(scripts: Path, start: str, how: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Runs a job that fails, and checks that it leaves nothing."""
    done = run([*STARTS[start], *flags, "fails.py", how], scripts)
    pids = [int(pid) for pid in re.findall(r"MYPID (\d+)", done.stdout)]
    assert len(pids) >= 6, done.stderr
    assert all_gone(pids, FAULT_S)
    files = re.findall(r"MYFILE (\S+)", done.stdout)
    assert start == "gloo" or files
    assert [file for file in files if Path(file).exists()] == []
    return done


def test_a_rank_that_raises_says_so_first_and_the_others_where_they_are(scripts, start):
    done = failing(scripts, start, "raise")
    assert done.returncode == 1
    assert done.stderr.startswith("rank 1 failed:\nTraceback (most recent call last):\n")
    assert f'fails.py", line {line_of("raise ValueError")}, in <module>' in done.stderr
    assert "ValueError: boom" in done.stderr
    assert "distcell/launch" not in done.stderr
    for rank in (0, 2):
        waits = rf"\n  \|  rank {rank} waits for \d s in #4 all_reduce over dp, 8 bytes  blocks.1"
        failed = rf"\n  \|  rank {rank} failed too: "  # gloo tells a rank that another has gone
        assert re.search(f"{waits}|{failed}", done.stderr)


@needs_mpi
@pytest.mark.parametrize("start", ["-n", "mpirun", "gloo"])
def test_the_exit_code_of_the_script_is_the_jobs(scripts, start):
    done = failing(scripts, start, "exit")
    assert done.returncode == 3
    assert done.stderr.startswith("error: rank 1 left the script with exit code 3\n")


def test_an_exit_without_a_word_is_said_by_who_watches(scripts, start):
    done = failing(scripts, start, "_exit")
    assert done.returncode == 3
    assert re.match(
        r"error: rank 1 on \S+ ended with exit code 3 inside of the script\n", done.stderr
    )


@pytest.mark.parametrize(("how", "name"), [("kill", "SIGKILL"), ("segv", "SIGSEGV")])
def test_a_rank_that_is_killed_is_named_and_takes_the_others_with_it(scripts, start, how, name):
    done = failing(scripts, start, how)
    assert done.returncode not in (0, 1)
    said = re.findall(r"^error: (rank \d+) on \S+ was ended by (\w+)$", done.stderr, re.MULTILINE)
    assert said == [("rank 1", name)]
    # Open MPI shows where a rank crashed, which it does before the rank is gone
    assert done.stderr.startswith("error: rank 1") or "Segmentation fault" in done.stderr


def test_what_a_killed_rank_had_started_ends_too(scripts, start):
    failing(scripts, start, "orphan")


@needs_mpi
def test_a_rank_that_dies_while_mpi_starts_leaves_no_file(scripts):
    done = run([str(MPIRUN), "-n", "3", sys.executable, "early.py"], scripts)
    assert "rank 1" in done.stderr
    files = re.findall(r"MYFILE (\S+)", done.stdout)
    assert [file for file in files if Path(file).exists()] == []


def test_an_error_that_all_ranks_meet_is_said_once_without_a_traceback(scripts, start):
    done = failing(scripts, start, "error")
    assert done.returncode == 2
    assert done.stderr.count("error: the same on all ranks\n  = hint: mend it\n") == 1
    assert "Traceback" not in done.stderr


def test_a_rank_that_does_not_come_to_a_collective_is_named(scripts, start):
    done = failing(scripts, start, "stop", "--stall-after", "1")
    assert done.returncode == 2
    assert done.stderr.startswith("error: a collective did not finish within 1 s\n")
    waits = r"rank 0 waits for \d s in #4 all_reduce over dp, 8 bytes  blocks.1.mlp"
    assert re.search(waits, done.stderr)
    place = rf"fails\.py:{line_of('time.sleep')} in <module>"
    assert re.search(f"rank 1 is in no collective, but at .*{place}", done.stderr)


def test_a_rank_that_returns_while_others_wait_is_named_long_before_a_stall(scripts, start):
    done = failing(scripts, start, "return")
    assert done.returncode == 2
    assert done.stderr.startswith("error: the ranks wait for each other and none can go on\n")
    assert "rank 1 has left the script" in done.stderr
    assert re.search(r"rank 2 waits for \d s in #4 all_reduce over dp", done.stderr)


def test_mismatched_collectives_are_named_long_before_a_stall(scripts, start):
    done = failing(scripts, start, "mismatch")
    assert done.returncode in (1, 2)
    assert "all_gather over dp, 4 bytes  blocks.2.mlp" in done.stderr
    assert "all_reduce over dp, 8 bytes  blocks.1.mlp" in done.stderr


@pytest.mark.parametrize("backend", [pytest.param("mpi", marks=needs_mpi, id="over-mpi"), "gloo"])
def test_ranks_that_wait_for_each_other_are_named_long_before_a_stall(scripts, backend):
    done = run([*LAUNCH, "-n", "4", "--backend", backend, "crosswise.py"], scripts)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the ranks wait for each other and none can go on\n")
    assert re.search(r"rank 0 waits for \d s in #[12] (connect|all_reduce) over dp, ", done.stderr)
    assert re.search(r"rank 1 waits for \d s in #[12] (connect|all_reduce) over tp, ", done.stderr)
    assert "their programs differ" in done.stderr


def test_to_plan_is_no_stall_however_long_it_takes(scripts, start):
    done = run([*STARTS[start], "--stall-after", "0.5", "plans.py"], scripts)
    assert (done.returncode, done.stdout.count("planned")) == (0, 3), done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_all_ranks(scripts, start, number):
    with subprocess.Popen(
        [*STARTS[start], "fails.py", "stop"],
        cwd=scripts,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdout is not None
        assert job.stderr is not None
        pids: list[int] = []
        while len(pids) < 6:
            if found := re.match(r"MYPID (\d+)", job.stdout.readline()):
                pids.append(int(found[1]))
        job.send_signal(number)
        assert job.wait(FAULT_S) != 0
        assert "Traceback" not in job.stderr.read()
    assert all_gone(pids, FAULT_S)


def test_under_torchrun_too_a_killed_rank_is_named_first(scripts):
    done = run([*TORCHRUN, "distcell.launch", "fails.py", "kill"], scripts)
    assert done.returncode != 0
    pids = [int(pid) for pid in re.findall(r"MYPID (\d+)", done.stdout)]
    assert all_gone(pids[::2], FAULT_S)
    assert re.search(r"^error: rank 1 on \S+ was ended by SIGKILL$", done.stderr, re.MULTILINE)
    assert done.stderr.index("was ended by SIGKILL") < done.stderr.index("ChildFailedError")
