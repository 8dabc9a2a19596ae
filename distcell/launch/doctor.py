"""`python -m distcell doctor`: what is here, what works, what is wrong and how to mend it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from distcell.errors import BackendError, DistcellError, LaunchError
from distcell.launch import probe
from distcell.launch.command_line import CommandParser
from distcell.report.figures import human
from distcell.report.table import Block, Table, show
from distcell.runtime import world
from distcell.runtime.mpi_installation import (
    INSTALL,
    Mpi,
    check_that_they_match,
    find_mpirun,
    mpi_library,
    mpirun_at,
)
from distcell.runtime.rank_environment import RankEnvironment, find_ranks

_BACKENDS = ("mpi", "gloo", "nccl")
_PROBE_S = 120
_SHARED_PER_RANK = 8 << 20
_DESCRIPTION = """\
Say which versions and which MPI are here, time an all-reduce on each backend, and say what is
wrong and how to mend it. Started alone it starts ranks itself; under mpirun, srun or torchrun it
looks at the ranks that they started, on all their hosts.

Exits with 0 when all is well, with 2 when something is wrong."""


@dataclass
class Findings:
    """What was found.

    Args:
        mpi: The library and the mpirun, or in place of one why it is not there.
        ranks: What each rank says.
        backends: By backend the seconds of an all-reduce, or why it was not run.
        problems: What is wrong.
    """

    mpi: dict[str, Mpi | str] = field(default_factory=dict)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    backends: dict[str, float | str] = field(default_factory=dict)
    problems: list[DistcellError] = field(default_factory=list)


def doctor(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0 when all is well, 2 when something is wrong.

    Args:
        arguments: What stands behind `doctor`.

    Raises:
        LaunchError: A flag is not known or out of range.
    """
    asked = _parser().parse_args(list(arguments)).ranks
    started = find_ranks(os.environ)
    if started is None or started.size == 1:
        findings = examine_alone(asked or 2)
    elif asked is not None:
        raise LaunchError(f"-n {asked}, but {started.launcher} started ranks", hint="leave -n out")
    else:
        findings = examine_ranks(started)
    if started is None or started.rank == 0:
        show(blocks_of(findings), sys.stdout)
        sys.stdout.flush()
    return BackendError.exit_code if findings.problems else 0


def examine_alone(ranks: int) -> Findings:
    """Returns what is found on this machine, with ranks that are started here.

    Args:
        ranks: How many to start on each backend.
    """
    findings = Findings()
    _examine_mpi(findings)
    for backend in _BACKENDS:
        reason = _why_not(backend, ranks, findings)
        if reason is not None:
            findings.backends[backend] = reason
            continue
        try:
            found = _probe(backend, ranks)
        except LaunchError as error:
            findings.backends[backend] = "fails"
            findings.problems.append(error)
            continue
        findings.backends[backend] = found["seconds"][backend]
        findings.ranks = findings.ranks or found["ranks"]
    findings.problems += problems_of_ranks(findings.ranks)
    return findings


def examine_ranks(started: RankEnvironment) -> Findings:
    """Returns what is found on the ranks that a launcher started. Collective.

    Args:
        started: What the launcher says.
    """
    findings = Findings()
    if started.by_mpi and started.rank == 0:
        _examine_mpi(findings)
    try:
        here = world.init()
        found = probe.probe(also_gloo=True)
    except DistcellError as error:
        findings.problems.append(error)
        return findings
    findings.backends = dict.fromkeys(_BACKENDS, "not what carries these ranks") | found["seconds"]
    findings.ranks = found["ranks"]
    if started.by_mpi and here.backend != "mpi":
        text = f"{started.launcher} started the ranks, but they talk over {here.backend}"
        findings.problems.append(BackendError(text, hint=INSTALL))
    findings.problems += problems_of_ranks(findings.ranks)
    return findings


def problems_of_ranks(ranks: Sequence[dict[str, Any]]) -> list[DistcellError]:
    """Returns what is wrong with what the ranks say.

    Args:
        ranks: What `probe.describe_rank` gave on each.
    """
    problems: list[DistcellError] = []
    for package in ranks[0]["versions"] if ranks else ():
        found: dict[str, list[str]] = {}
        for rank, said in enumerate(ranks):
            found.setdefault(said["versions"][package], []).append(f"rank {rank} on {said['host']}")
        if len(found) > 1:
            problems.append(
                LaunchError(
                    f"the ranks run different versions of {package}",
                    where=[f"{version}: {', '.join(who[:4])}" for version, who in found.items()],
                    hint="use the same environment on every host",
                )
            )
    for host, count, said in _hosts(ranks):
        if said["shared"] < _SHARED_PER_RANK * count:
            problems.append(
                BackendError(
                    f"{host} has {human(said['shared'])} of shared memory free for {count} ranks",
                    where=["ranks of a host reduce large tensors there; without it they send them"],
                    hint="remove old files from /dev/shm, or give a container more: "
                    "docker run --shm-size 8g, in Kubernetes a volume at /dev/shm",
                )
            )
        if len({each["host"] for each in ranks}) > 1 and not said["resolves"]:
            problems.append(
                LaunchError(
                    f"{host} does not know an address of its own name",
                    hint=f"add {host} to DNS or to /etc/hosts on all hosts",
                )
            )
    return problems


def blocks_of(findings: Findings) -> list[Block]:
    """Returns the report."""
    rows = list(probe.versions().items())
    rows += [(what, _of_mpi(found)) for what, found in findings.mpi.items()]
    blocks: list[Block] = [Table("versions", ("", ""), tuple(rows))]
    hosts = tuple(
        (host, str(count), str(said["cores"]), _quota(said), str(said["threads"]), *_free(said))
        for host, count, said in _hosts(findings.ranks)
    )
    heads = ("host", ">ranks", ">cores", ">granted", ">threads per rank", ">/dev/shm free", ">GPUs")
    if hosts:
        blocks.append(Table("hosts", heads, hosts))
    timed = tuple(
        (name, found if isinstance(found, str) else f"{1000 * found:.2f} ms")
        for name, found in findings.backends.items()
    )
    if timed:
        title = f"all-reduce of 1 MiB on {len(findings.ranks)} ranks, median"
        blocks.append(Table(title, ("", ""), timed))
    blocks += [problem.render() for problem in findings.problems]
    count = len(findings.problems)
    blocks.append(f"{count} thing{'s' if count > 1 else ''} to mend" if count else "all is well")
    return blocks


def _examine_mpi(findings: Findings) -> None:
    path = find_mpirun()
    mpirun = mpirun_at(path) if path is not None else None
    findings.mpi["mpirun"] = mpirun or "none"
    try:
        library = findings.mpi["MPI library"] = mpi_library()
    except BackendError as error:
        findings.mpi["MPI library"] = "none"
        if mpirun is not None:  # without both there is no MPI, which is no fault: gloo is there
            findings.problems.append(error)
        return
    if mpirun is None:
        text = "there is an MPI library, and no mpirun"
        where = [f"library  {library}  {library.path}"]
        findings.problems.append(BackendError(text, where=where, hint=f"{INSTALL}, whole"))
        return
    try:
        check_that_they_match(mpirun, library)
    except BackendError as error:
        findings.problems.append(error)


def _why_not(backend: str, ranks: int, findings: Findings) -> str | None:
    devices = torch.cuda.device_count()
    if backend == "nccl" and devices < ranks:
        return f"{devices} CUDA devices for {ranks} ranks"
    if backend == "mpi" and findings.problems:
        return "see below"
    if backend == "mpi" and "none" in findings.mpi.values():
        return f"no MPI: {INSTALL}"
    return None


def _probe(backend: str, ranks: int) -> dict[str, Any]:
    """What ranks say that the launcher starts."""
    script = str(Path(probe.__file__))
    command = [sys.executable, "-m", "distcell.launch", "-n", str(ranks), "--backend", backend]
    with subprocess.Popen(
        [*command, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as job:
        try:
            out, err = job.communicate(timeout=_PROBE_S)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            out, err = job.communicate()
            err = f"it did not end within {_PROBE_S} s\n{err}"
    said = [line for line in out.splitlines() if line.startswith(probe.MARK)]
    if job.returncode or not said:
        lines = [line for line in err.splitlines() if line.strip()][:8]
        text = f"{ranks} ranks over {backend} fail"
        raise LaunchError(text, where=lines, hint=f"try it alone: {' '.join(command[1:])} SCRIPT")
    found: dict[str, Any] = json.loads(said[0].removeprefix(probe.MARK))
    return found


def _hosts(ranks: Sequence[dict[str, Any]]) -> list[tuple[str, int, dict[str, Any]]]:
    """By host the number of its ranks, and what the first of them says."""
    names = [said["host"] for said in ranks]
    return [(host, names.count(host), ranks[names.index(host)]) for host in dict.fromkeys(names)]


def _of_mpi(found: Mpi | str) -> str:
    return found if isinstance(found, str) else f"{found}  {found.path}"


def _quota(said: dict[str, Any]) -> str:
    return "all" if said["quota"] is None else f"{said['quota']:g}"


def _free(said: dict[str, Any]) -> tuple[str, str]:
    return human(said["shared"]), str(said["devices"])


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m distcell doctor",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-n", dest="ranks", type=_several, metavar="N", help="ranks to start (default: 2)"
    )
    return parser


def _several(text: str) -> int:
    if not text.isdigit() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number of at least 2")
    return int(text)
