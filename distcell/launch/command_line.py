"""The flags of `python -m distcell.launch`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from distcell.context import BACKENDS, LaunchOptions
from distcell.errors import LaunchError, did_you_mean
from distcell.mesh import Mesh
from distcell.strategy.library import load_strategy

PLACES = ("slurm", "pbs", "k8s")

_DESCRIPTION = """\
Run a training script on many ranks under a strategy.

Under mpirun, srun or torchrun the ranks that they started are used. With -n alone the ranks
are started here. With --simulate one process plays all ranks."""


@dataclass(frozen=True)
class Command:
    """What the command line asks for.

    Args:
        script: The path of the script.
        arguments: The script's own arguments.
        ranks: The number of ranks to start; None takes those that are there.
        simulate: The number of ranks to play in one process.
        strategy: The name or path of the strategy file.
        backend: What carries the collectives.
        threads: Threads for each rank; None divides the cores by the ranks of the host.
        stall_after: Seconds after which an unfinished collective ends the job.
        seed: What all ranks are seeded with.
        bind: Whether each rank gets cores of its own.
        prefix: Whether each line that a rank prints begins with rank and host.
        log_dir: The folder for one file per rank with what it prints.
        on: The cluster that the job is handed to: `slurm`, `pbs` or `k8s`; None runs it here.
        nodes: The number of its hosts; None takes that of the job file.
        image: The image of its pods, on `k8s`.
        dry_run: Whether the command for the cluster is shown and not run.
    """

    script: str
    arguments: tuple[str, ...] = ()
    ranks: int | None = None
    simulate: int | None = None
    strategy: str | None = None
    backend: str = "auto"
    threads: int | None = None
    stall_after: float = 300.0
    seed: int = 0
    bind: bool = False
    prefix: bool = False
    log_dir: str | None = None
    on: str | None = None
    nodes: int | None = None
    image: str | None = None
    dry_run: bool = False

    def check(self, size: int) -> None:
        """Raises when the job cannot run on `size` ranks.

        Raises:
            LaunchError: The script is not there.
            StrategyError: The strategy is not there, malformed, or has another number of ranks.
        """
        if not Path(self.script).is_file():
            folder = Path(self.script).parent
            near = [str(path) for path in sorted(folder.glob("*.py"))]
            hint = did_you_mean(self.script, near) or "give the path of a Python file"
            raise LaunchError(f"there is no script `{self.script}`", hint=hint)
        if self.strategy is not None:
            Mesh(load_strategy(self.strategy).mesh_for(size))

    def options(self, size: int) -> LaunchOptions:
        """Returns what the script's process is told."""
        return LaunchOptions(
            mode="simulate" if self.simulate else "ranks",
            ranks=self.simulate or size,
            strategy=self.strategy,
            backend=self.backend,
            seed=self.seed,
            stall_after=self.stall_after,
        )

    def for_ranks(self) -> list[str]:
        """Returns the arguments that each rank of this job is started with: what is no default."""
        names = "strategy backend threads bind stall_after seed prefix log_dir".split()
        flags = [part for name in names for part in self._flag(name)]
        return [*flags, self.script, *self.arguments]

    def _flag(self, name: str) -> list[str]:
        value = getattr(self, name)
        if value == getattr(Command, name):
            return []
        flag = "--" + name.replace("_", "-")
        return [flag] if value is True else [flag, str(value)]


def parse(arguments: Sequence[str]) -> Command:
    """Returns the command that the arguments describe.

    Raises:
        LaunchError: A flag is not known, a value is out of range, or two flags exclude each other.

    Example:
        >>> parse(["-n", "8", "--strategy", "tensor", "train.py", "--steps", "3"]).arguments
        ('--steps', '3')
    """
    known, unknown = _parser().parse_known_args(list(arguments))
    if unknown:
        raise LaunchError(f"no flag `{unknown[0]}`", hint=did_you_mean(unknown[0], flags()))
    if known.ranks is not None and known.simulate is not None:
        raise LaunchError(
            "-n starts ranks and --simulate plays them in one process",
            hint="leave one of the two out",
        )
    _check_cluster_flags(known)
    if known.script is None:
        raise LaunchError(
            "no script to run", hint="python -m distcell.launch [flags] train.py [arguments]"
        )
    return Command(
        known.script,
        tuple(known.arguments),
        ranks=known.ranks,
        simulate=known.simulate,
        strategy=known.strategy,
        backend=known.backend,
        threads=known.threads,
        stall_after=known.stall_after,
        seed=known.seed,
        bind=known.bind,
        prefix=known.prefix,
        log_dir=known.log_dir,
        on=known.on,
        nodes=known.nodes,
        image=known.image,
        dry_run=known.dry_run,
    )


def _check_cluster_flags(known: argparse.Namespace) -> None:
    given = {"--nodes": known.nodes, "--image": known.image, "--dry-run": known.dry_run or None}
    alone = [flag for flag, value in given.items() if value is not None]
    if known.on is None and alone:
        raise LaunchError(
            f"{alone[0]} is for a job on a cluster", hint=f"add --on {', --on '.join(PLACES)}"
        )
    if known.on is not None and known.simulate is not None:
        raise LaunchError("--simulate plays all ranks here", hint="leave it or --on out")
    if known.on not in (None, "k8s") and known.image is not None:
        raise LaunchError(f"--on {known.on} runs in no image", hint="leave --image out")


def flags() -> list[str]:
    """Returns all flags; a test freezes them."""
    return sorted(flag for action in _parser()._actions for flag in action.option_strings)


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are raised, as all errors of distcell are."""

    def error(self, message: str) -> NoReturn:
        """Raises what is wrong with the arguments.

        Raises:
            LaunchError: Always.
        """
        raise LaunchError(message, hint=f"see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m distcell.launch",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-n", dest="ranks", type=_count, metavar="N", help="start N ranks on this machine")
    add("--simulate", type=_count, metavar="N", help="play N ranks in this process")
    add("--strategy", metavar="NAME|FILE", help="how the model is split (default: data)")
    add(
        "--backend",
        choices=BACKENDS,
        default="auto",
        help="what carries the collectives (default: MPI where there is one, else gloo or NCCL)",
    )
    add("--threads", type=_count, metavar="T", help="threads per rank (default: cores / ranks)")
    add("--bind", action="store_true", help="give each rank cores of its own")
    add(
        "--stall-after",
        type=_seconds,
        default=300.0,
        metavar="S",
        help="end the job when a collective takes longer than S seconds (default: 300)",
    )
    add("--seed", type=_seed, default=0, metavar="S", help="seed of all ranks (default: 0)")
    add("--prefix", action="store_true", help="begin each line of a rank with rank and host")
    add("--log-dir", metavar="DIR", help="write what rank N prints to DIR/rank-N.log too")
    add("--on", choices=PLACES, help="hand the job to this cluster; -n counts all ranks")
    add("--nodes", type=_count, metavar="N", help="hosts of the job on a cluster (default: 2)")
    add("--image", metavar="NAME", help="the image of the pods, with --on k8s")
    add("--dry-run", action="store_true", help="with --on: show the command and do nothing")
    add("script", nargs="?", help="the Python script that every rank runs")
    add("arguments", metavar="...", nargs=argparse.REMAINDER, help="the script's own arguments")
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number of at least 1")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number from 0 upwards")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"`{text}` is not a number of seconds above 0")
    return value
