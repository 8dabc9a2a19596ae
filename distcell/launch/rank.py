"""One rank: joins the others, sets itself up like them, and runs the script."""

from __future__ import annotations

import gc
import os
import random
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from distcell.compat import make_optimizers_without_compiler
from distcell.context import set_launch
from distcell.errors import BackendError, DistcellError, LaunchError
from distcell.launch.agreement import check_agreement, describe
from distcell.launch.command_line import Command, parse
from distcell.launch.copies import looking_for_copies
from distcell.launch.faults import run_to_the_end
from distcell.launch.memory import keep_freed_memory
from distcell.launch.threads import core_quota, own_cores, threads_for, usable_cores
from distcell.launch.watchdog import Watchdog
from distcell.mesh import Mesh
from distcell.runtime import world
from distcell.runtime.rank_environment import RankEnvironment

_GRACE_S = 3.0


def run_alone(command: Command) -> int:
    """Runs the script in this process: as a single rank, or as all simulated ones."""

    def body() -> None:
        command.check(command.simulate or 1)
        world.init(command.backend)
        threads = threads_for(usable_cores(), [usable_cores()], core_quota())
        _set_up(command, 1, threads)
        _run_script(command)

    return run_to_the_end(body, _path(command))


def run_as_rank(arguments: Sequence[str], found: RankEnvironment) -> int:
    """Runs the script as one of the ranks that a launcher started.

    Args:
        arguments: The command line.
        found: What the launcher says.
    """
    command, error = _parse(arguments)
    if not _join(command, found):
        return BackendError.exit_code
    watchdogs: list[Watchdog] = []

    def body() -> None:
        if command is None:
            assert error is not None
            raise error
        _check_ranks(command, found)
        command.check(found.size)
        described = _exchange(describe(command))
        check_agreement(described)
        _set_up(command, found.size, _divide_cores(described, found.rank, bind=command.bind))
        watchdogs.append(Watchdog(command.stall_after))
        watchdogs[0].start()
        with looking_for_copies(_path(command)):
            _run_script(command)

    code = run_to_the_end(body, _path(command) if command else "")
    for watchdog in watchdogs:
        watchdog.end()
    return code


def _parse(arguments: Sequence[str]) -> tuple[Command | None, DistcellError | None]:
    """The command, or why there is none: said only when the ranks can agree on who says it."""
    try:
        return parse(arguments), None
    except DistcellError as error:
        return None, error


def _join(command: Command | None, found: RankEnvironment) -> bool:
    """Joins the other ranks. Where that fails, one rank of the host says why, and has time to."""
    asked = command.backend if command else "auto"
    try:
        here = world.init(asked)
    except DistcellError as error:
        if found.local_rank:  # where a launcher does not say, each speaks
            time.sleep(_GRACE_S)
        else:
            print(error.render(), file=sys.stderr, flush=True)
        return False
    if asked == "auto" and found.by_mpi and here.backend != "mpi" and here.rank == 0:
        text = f"distcell: no MPI library found; the ranks talk over {here.backend}"
        print(text, file=sys.stderr, flush=True)
    return True


def _check_ranks(command: Command, found: RankEnvironment) -> None:
    if command.simulate is not None:
        raise LaunchError(
            f"--simulate plays all ranks in one process, {found.launcher} started {found.size}",
            hint=f"leave {found.launcher} or --simulate out",
        )
    if command.on is not None:
        raise LaunchError(
            f"--on {command.on} starts a job, and {found.launcher} has started this one",
            hint="run it by itself, where jobs are submitted",
        )
    if command.ranks not in (None, found.size):
        raise LaunchError(
            f"-n {command.ranks} asks for other ranks than the {found.size} of {found.launcher}",
            hint="leave -n out",
        )


def _exchange(obj: dict[str, Any]) -> list[Any]:
    size = world.current_world().size
    return world.collectives_for(Mesh((("rank", size),))).all_gather_object(obj)


def _divide_cores(described: Sequence[dict[str, Any]], rank: int, *, bind: bool) -> int:
    """The number of threads of this rank, after it was bound to cores of its own where asked."""
    host = described[rank]["host"]
    ranks = [number for number, entry in enumerate(described) if entry["host"] == host]
    local = [described[number]["cores"] for number in ranks]
    place = ranks.index(rank)
    if not bind:
        return threads_for(local[place], local, core_quota())
    cores = own_cores(local[place], local, place)
    os.sched_setaffinity(0, cores)
    others: list[list[int]] = [[] for _ in local[1:]]
    return threads_for(cores, [cores, *others], core_quota())


def _set_up(command: Command, size: int, threads: int) -> None:
    """Threads, seeds and environment: the same on all ranks, before the script's first line."""
    set_launch(command.options(size))
    threads = command.threads or _threads_of_user() or threads
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    _seed(command.seed)
    make_optimizers_without_compiler()
    keep_freed_memory()
    gc.freeze()  # torch's own objects stay: the collector need not look through them at every pass
    here, (host, port) = world.current_world(), world.master()
    os.environ.update(
        RANK=str(here.rank),
        WORLD_SIZE=str(here.size),
        LOCAL_RANK=str(here.local_rank),
        LOCAL_WORLD_SIZE=str(here.local_size),
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
    )


def _threads_of_user() -> int | None:
    """What the user set. torchrun sets 1 where the user did not, which is not the user's word."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    by_torchrun = text == "1" and "TORCHELASTIC_RUN_ID" in os.environ
    return int(text) if text.isdigit() and int(text) > 0 and not by_torchrun else None


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _path(command: Command) -> str:
    return str(Path(command.script).resolve())


def _run_script(command: Command) -> None:
    path = _path(command)
    sys.argv = [command.script, *command.arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")
