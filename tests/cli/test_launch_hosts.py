"""Jobs of 2 x 2 ranks on two hosts, under MPI and under torchrun."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.hosts import Hosts, two_hosts
from tests.cli.jobs import LAUNCH, MPIRUN, all_gone, needs_mpi, run

pytestmark = pytest.mark.slow

PATIENCE_S = 150
FAULT_S = 10

TRAINS = """
import os, signal, sys
import torch
import distcell as dc
from distcell.runtime import world
from tests import models

torch.manual_seed(0)
net = dc.parallelize(models.gpt())
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, eps=1e-5)
here = world.current_world()
sys.stdout.write(f"MYPID {os.getpid()}\\nMYPID {os.getppid()}\\n")
for step, batch in enumerate(models.token_batches(3)):
    loss = net(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if here.rank == 0:
        sys.stdout.write(f"LOSS {loss.item()!r}\\n")
    if "kill" in sys.argv and here.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
sys.stdout.write(f"RANK {here.rank} {here.local_rank} of {here.local_size} over {here.backend}\\n")
"""

OF_TWO_HOSTS = ["0 0 of 2", "1 1 of 2", "2 0 of 2", "3 1 of 2"]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    (tmp_path / "train.py").write_text(TRAINS)
    with two_hosts(tmp_path) as found:
        yield found


def losses(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"LOSS (\S+)", text)]


def check_training(printed: str, backend: str, folder: Path) -> None:
    """Compares with the same script on one device; and the ranks must be where they should be."""
    expected = losses(run([sys.executable, "train.py"], folder, OMP_NUM_THREADS="1").stdout)
    assert len(expected) == 3
    assert losses(printed) == pytest.approx(expected, rel=1e-5)
    found = sorted(re.findall(r"RANK (\d \d of \d) over (\w+)", printed))
    assert found == [(rank, backend) for rank in OF_TWO_HOSTS]


def mpirun(hosts: Hosts, *command: str) -> list[str]:
    """The command that starts two ranks on each host, from the first."""
    places = ",".join(f"{name}:2" for name in hosts.names)
    return [str(MPIRUN), "-host", places, "-n", "4", *LAUNCH, *command]


def end(job: subprocess.Popen[str]) -> tuple[int, str, str]:
    with job:
        try:
            out, err = job.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            job.kill()
            raise
    return job.returncode, out, err


@needs_mpi
def test_over_mpi_the_losses_are_those_of_one_device(hosts):
    command = mpirun(hosts, "--strategy", "data-tensor", "train.py")
    code, out, err = end(hosts.start(0, command))
    assert code == 0, err
    check_training(out, "mpi", hosts.folder)


def test_under_torchrun_the_losses_are_those_of_one_device(hosts):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    torchrun += ["--nproc-per-node", "2", "--master-addr", hosts.names[0], "--master-port", "29511"]
    script = ["-m", "distcell.launch", "--strategy", "data-tensor", "train.py"]
    jobs = [hosts.start(n, [*torchrun, "--node-rank", str(n), *script]) for n in (0, 1)]
    ended = [end(job) for job in jobs]
    assert [code for code, _, _ in ended] == [0, 0], ended
    check_training("".join(out for _, out, _ in ended), "gloo", hosts.folder)


@needs_mpi
def test_a_rank_that_is_killed_on_another_host_is_named_with_it(hosts):
    code, out, err = end(hosts.start(0, mpirun(hosts, "train.py", "kill")))
    assert code != 0
    assert f"error: rank 3 on {hosts.names[1]} was ended by SIGKILL\n" in err
    pids = [int(pid) for pid in re.findall(r"MYPID (\d+)", out)]
    assert all_gone(pids, FAULT_S)


def test_a_host_that_cannot_be_reached_is_one_error(hosts):
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29511", "MASTER_ADDR": hosts.nowhere}
    code, _, err = end(hosts.start(1, [*LAUNCH, "train.py"], **environ))
    assert code == 2
    assert f"error: cannot reach {hosts.nowhere}:29511, where the ranks meet\n" in err
    assert "TCPStore" not in err
