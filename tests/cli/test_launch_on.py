"""`--on slurm | pbs | k8s`: what is composed, and the job files as they run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from distcell._resources import resource_dir
from distcell.errors import LaunchError, StrategyError
from distcell.launch.__main__ import main
from distcell.launch.command_line import parse
from distcell.launch.job_files import submit
from tests.cli.jobs import LAUNCH, MPIRUN, environment, needs_mpi

FILES = resource_dir("launcher")

PRINTS = """
import os, sys
from distcell.runtime import world
here = world.current_world()
print(here.rank, "of", here.size, "over", here.backend, sys.argv[1:], flush=True)
"""

SBATCH = """#!/bin/bash
# Runs the batch script here, with what Slurm would set.
while [[ $1 == --* ]]; do
  case $1 in
    --nodes=*) nodes=${1#*=} ;;
    --ntasks-per-node=*) tasks=${1#*=} ;;
    *) exit 64 ;;
  esac
  shift
done
file=$1; shift
export SLURM_JOB_ID=$$ SLURM_JOB_NODELIST=here TASKS=$((nodes * tasks)) SLURM_CPUS_PER_TASK=1
exec bash "$file" "$@"
"""

SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_NUM_TASKS=$TASKS
for ((i = 0; i < TASKS; i++)); do SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & done
code=0
for job in $(jobs -p); do wait "$job" || code=$?; done
exit $code
"""

QSUB = """#!/bin/bash
# Runs the job script here, with what PBS would set.
[[ $1 == -l && $3 == -v && $4 == ARGS,PYTHON ]] || exit 64
[[ $2 =~ ^select=([0-9]+):ncpus=[0-9]+:mpiprocs=([0-9]+)$ ]] || exit 65
export PBS_O_WORKDIR=$PWD PBS_NODEFILE=$PWD/nodes
for ((i = 0; i < BASH_REMATCH[1] * BASH_REMATCH[2]; i++)); do echo localhost; done > nodes
exec bash "$5"
"""


def shown(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main([*flags, "--dry-run", __file__, "--lr", "two words"]) == 0
    return capsys.readouterr().out.strip()


@pytest.fixture(autouse=True)
def _python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON", "py")
    for name in list(os.environ):
        if name.startswith(("PMI", "OMPI")):
            monkeypatch.delenv(name)


def test_slurm(capsys):
    rest = f"{FILES}/slurm.sbatch"
    assert shown(capsys, "--on", "slurm") == (
        f"PYTHON=py sbatch --nodes=2 --ntasks-per-node=4 {rest} {__file__} --lr 'two words'"
    )
    flags = ["--nodes", "4", "-n", "32", "--threads", "2", "--strategy", "data", "--bind"]
    assert shown(capsys, "--on", "slurm", *flags) == (
        f"PYTHON=py sbatch --nodes=4 --ntasks-per-node=8 --cpus-per-task=2 {rest} "
        f"--strategy data --threads 2 --bind {__file__} --lr 'two words'"
    )


def test_pbs(capsys):
    text = shown(capsys, "--on", "pbs", "--nodes", "3", "-n", "6", "--backend", "gloo")
    assert text.endswith(
        f"PYTHON=py qsub -l select=3:ncpus=8:mpiprocs=2 -v ARGS,PYTHON {FILES}/pbs.sh"
    )
    assert text.startswith("ARGS='--backend gloo ")


def test_kubernetes_over_mpi(capsys):
    flags = ["--nodes", "3", "-n", "6", "--image", "mine:1", "--seed", "5"]
    first, _, manifest = shown(capsys, "--on", "k8s", *flags).partition("\n")
    assert first == "# kubectl apply -f -"
    job = yaml.safe_load(manifest)
    assert job["kind"] == "MPIJob"
    assert job["spec"]["slotsPerWorker"] == 2
    launcher, worker = (job["spec"]["mpiReplicaSpecs"][role] for role in ("Launcher", "Worker"))
    assert worker["replicas"] == 3
    container = launcher["template"]["spec"]["containers"][0]
    assert container["command"][:3] == ["mpirun", "-n", "6"]
    assert container["args"] == ["--seed", "5", __file__, "--lr", "two words"]
    assert "registry.example.com" not in manifest


@pytest.mark.parametrize(("nodes", "others"), [("1", None), ("3", 2)])
def test_kubernetes_with_torchrun(capsys, nodes, others):
    flags = ["--backend", "nccl", "--image", "mine:1", "--nodes", nodes]
    job = yaml.safe_load(shown(capsys, "--on", "k8s", *flags))
    assert job["kind"] == "PyTorchJob"
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas.get("Worker", {}).get("replicas") == others
    for role in replicas.values():
        container = role["template"]["spec"]["containers"][0]
        assert (container["image"], container["args"][:2]) == ("mine:1", ["--backend", "nccl"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nodes", "2"], "--nodes is for a job on a cluster"),
        (["--dry-run"], "--dry-run is for a job on a cluster"),
        (["--on", "slurm", "--simulate", "2"], "--simulate plays all ranks here"),
        (["--on", "pbs", "--image", "x"], "--on pbs runs in no image"),
        (["--on", "lsf"], "invalid choice: 'lsf'"),
        (["--on", "slurm", "--nodes", "0"], "`0` is not a number of at least 1"),
        (["--on", "slurm", "--nodes", "3", "-n", "16"], "16 ranks cannot be divided evenly"),
        (["--on", "k8s"], "--on k8s needs the image"),
        (["--on", "slurm"], "there is no `sbatch` here"),
    ],
)
def test_a_wrong_command_is_one_clear_error(monkeypatch, tmp_path, flags, message):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=message) as caught:
        submit(parse([*flags, __file__]))
    assert caught.value.hint


def test_script_and_strategy_are_checked_before_a_job_waits_in_a_queue(tmp_path):
    with pytest.raises(LaunchError, match="there is no script"):
        submit(parse(["--on", "slurm", "--dry-run", str(tmp_path / "no.py")]))
    (tmp_path / "s.yaml").write_text("distcell: 1\nmesh: {dp: 3}\n")
    flags = ["--on", "slurm", "--dry-run", "--strategy", str(tmp_path / "s.yaml")]
    with pytest.raises(StrategyError):
        submit(parse([*flags, __file__]))


@pytest.mark.parametrize("name", ["local.sh", "pbs.sh", "slurm.sbatch"])
def test_a_job_file_is_a_script(name):
    subprocess.run(["bash", "-n", FILES / name], check=True)


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A folder with a script, and one with programs that play a cluster on this machine."""
    (tmp_path / "prints.py").write_text(PRINTS)
    programs = tmp_path / "bin"
    programs.mkdir()
    texts = {"sbatch": SBATCH, "srun": SRUN, "qsub": QSUB}
    texts["scontrol"] = "#!/bin/bash\n[[ $1 == show && $3 == here ]] && echo localhost\n"
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return tmp_path


def started(cluster: Path, *command: str, **more: str) -> list[str]:
    paths = [str(cluster / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    done = subprocess.run(
        [*LAUNCH, *command],
        cwd=cluster,
        env=environment(PATH=os.pathsep.join(paths), PYTHON=sys.executable, **more),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return sorted(re.findall(r"\d of \d over .*", done.stdout))


@pytest.mark.slow
def test_the_file_for_slurm_starts_the_ranks(cluster):
    flags = ["--on", "slurm", "--nodes", "1", "-n", "2", "--backend", "gloo"]
    found = started(cluster, *flags, "prints.py", "two words", "a,b")
    assert found == [f"{rank} of 2 over gloo ['two words', 'a,b']" for rank in (0, 1)]


@needs_mpi
@pytest.mark.slow
def test_the_file_for_pbs_starts_the_ranks(cluster):
    assert MPIRUN is not None
    flags = ["--on", "pbs", "--nodes", "1", "-n", "2"]
    found = started(cluster, *flags, "prints.py", "two words", "a,b")
    assert found == [f"{rank} of 2 over mpi ['two words', 'a,b']" for rank in (0, 1)]
