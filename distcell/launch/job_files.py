"""`--on slurm | pbs | k8s`: the command, or the manifest, that starts this job on a cluster.

It is composed from the files of `launcher/`, which run as they are: what is asked for replaces what
stands in them.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from distcell._resources import resource_dir
from distcell.errors import LaunchError
from distcell.launch.command_line import Command


@dataclass(frozen=True)
class Submission:
    """What hands a job to a cluster.

    Args:
        command: The program and its arguments.
        environ: What it needs in its environment.
        text: What it reads; empty for nothing.
    """

    command: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)
    text: str = ""

    def __str__(self) -> str:
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environ.items()]
        shown = " ".join([*settings, shlex.join(self.command)])
        return f"# {shown}\n{self.text}".rstrip() if self.text else shown


def submit(command: Command) -> int:
    """Hands the job to the cluster, or shows how; returns the exit code.

    Args:
        command: The command, with `on` set.

    Raises:
        LaunchError: The ranks cannot be divided, the image is missing, or there is no such cluster.
        StrategyError: The strategy does not fit the number of ranks.
    """
    assert command.on is not None
    submission = _PLACES[command.on](command)
    if command.dry_run:
        print(submission)
        return 0
    program = submission.command[0]
    if shutil.which(program) is None:
        raise LaunchError(
            f"there is no `{program}` here",
            hint="run this where jobs are submitted, or add --dry-run to see the command",
        )
    done = subprocess.run(
        submission.command,
        env=os.environ | submission.environ,
        input=submission.text or None,
        text=True,
        check=False,
    )
    return done.returncode


def _slurm(command: Command) -> Submission:
    file, text = _read("slurm.sbatch")
    nodes, per_node = _divide(
        command, _number(r"--nodes=(\d+)", text), _number(r"--ntasks-per-node=(\d+)", text)
    )
    flags = [f"--nodes={nodes}", f"--ntasks-per-node={per_node}"]
    if command.threads is not None:
        flags.append(f"--cpus-per-task={command.threads}")
    return Submission(("sbatch", *flags, str(file), *command.for_ranks()), _python())


def _pbs(command: Command) -> Submission:
    file, text = _read("pbs.sh")
    default = _number(r"mpiprocs=(\d+)", text)
    nodes, per_node = _divide(command, _number(r"-l select=(\d+)", text), default)
    cores = command.threads or _number(r"ncpus=(\d+)", text) // default
    select = f"select={nodes}:ncpus={cores * per_node}:mpiprocs={per_node}"
    # By name alone: qsub would take a comma in a value for the end of it.
    environ = {"ARGS": shlex.join(command.for_ranks()), **_python()}
    return Submission(("qsub", "-l", select, "-v", ",".join(environ), str(file)), environ)


def _kubernetes(command: Command) -> Submission:
    over_mpi = command.backend in ("auto", "mpi")
    _, text = _read("k8s-mpijob.yaml" if over_mpi else "k8s-pytorchjob.yaml")
    if command.image is None:
        raise LaunchError(
            "--on k8s needs the image that the pods run",
            hint="--image NAME, with distcell and the script in /workspace",
        )
    job = yaml.safe_load(text)
    (_fill_mpi_job if over_mpi else _fill_torch_job)(job, command)
    manifest = yaml.safe_dump(job, sort_keys=False)
    return Submission(("kubectl", "apply", "-f", "-"), text=manifest)


def _fill_mpi_job(job: dict[str, Any], command: Command) -> None:
    spec = job["spec"]
    replicas = spec["mpiReplicaSpecs"]
    nodes, per_node = _divide(command, replicas["Worker"]["replicas"], spec["slotsPerWorker"])
    replicas["Worker"]["replicas"], spec["slotsPerWorker"] = nodes, per_node
    for role in replicas.values():
        role["template"]["spec"]["containers"][0]["image"] = command.image
    launcher = replicas["Launcher"]["template"]["spec"]["containers"][0]
    launcher["command"][launcher["command"].index("-n") + 1] = str(nodes * per_node)
    launcher["args"] = command.for_ranks()


def _fill_torch_job(job: dict[str, Any], command: Command) -> None:
    spec = job["spec"]
    replicas = spec["pytorchReplicaSpecs"]
    default = 1 + replicas["Worker"]["replicas"]
    nodes, per_node = _divide(command, default, int(spec["nprocPerNode"]))
    spec["nprocPerNode"] = str(per_node)
    container = replicas["Master"]["template"]["spec"]["containers"][0]
    container["image"], container["args"] = command.image, command.for_ranks()
    if nodes == 1:
        del replicas["Worker"]
    else:  # its template is the master's, by an anchor in the file
        replicas["Worker"]["replicas"] = nodes - 1


def _divide(command: Command, nodes: int, per_node: int) -> tuple[int, int]:
    """The nodes and the ranks of each, from what is asked for and what the file has."""
    nodes = command.nodes or nodes
    if command.ranks is not None:
        if command.ranks % nodes:
            raise LaunchError(
                f"{command.ranks} ranks cannot be divided evenly among {nodes} nodes",
                hint=f"-n {nodes * max(1, round(command.ranks / nodes))}, or other --nodes",
            )
        per_node = command.ranks // nodes
    command.check(nodes * per_node)
    return nodes, per_node


def _python() -> dict[str, str]:
    """The Python that the files start ranks with: this one, unless the user named another."""
    return {"PYTHON": os.environ.get("PYTHON", sys.executable)}


def _read(name: str) -> tuple[Path, str]:
    file = resource_dir("launcher") / name
    return file, file.read_text(encoding="utf-8")


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise LaunchError(f"launcher/ was changed: nothing there is like `{pattern}`")
    return int(found[1])


_PLACES: dict[str, Callable[[Command], Submission]] = {
    "slurm": _slurm,
    "pbs": _pbs,
    "k8s": _kubernetes,
}
