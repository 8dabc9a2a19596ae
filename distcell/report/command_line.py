"""The flags of `python -m distcell plan | check | explain`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from distcell.errors import LaunchError
from distcell.report.script import Script

_DESCRIPTION = """\
See what a strategy does to a training script before anything runs on ranks.

The script is run here, in this process, until its first training step is planned (plan,
explain) or for a few steps (check)."""


@dataclass(frozen=True)
class Command:
    """What the command line asks for.

    Args:
        action: `plan`, `check` or `explain`.
        script: The script.
        ranks: The number of ranks to plan for, or to simulate.
        strategy: The name or path of the strategy file.
        path: Of `explain`: what to explain.
        json: Of `plan`: the file for the summary as JSON.
        graph: Of `plan`: whether the whole program is printed.
        steps: Of `check`: the number of optimizer steps.
    """

    action: str
    script: Script
    ranks: int
    strategy: str | None = None
    path: str = ""
    json: str | None = None
    graph: bool = False
    steps: int = 3


def parse(arguments: Sequence[str]) -> Command:
    """Returns the command that the arguments describe.

    Raises:
        LaunchError: A flag is not known, a value is out of range, or the script is missing.
    """
    known = vars(_parser().parse_args(list(arguments)))
    script = Script(
        known.pop("script"),
        tuple(known.pop("arguments")),
        seed=known.pop("seed"),
        verbose=known.pop("verbose"),
    )
    return Command(script=script, **known)


def flags() -> dict[str, list[str]]:
    """Returns the flags of each command; a test freezes them."""
    return {
        name: sorted(flag for action in parser._actions for flag in action.option_strings)
        for name, parser in _parsers().items()
    }


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(message, hint=f"see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m distcell",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_commands(parser)
    return parser


def _parsers() -> dict[str, argparse.ArgumentParser]:
    return _add_commands(_Parser(prog="python -m distcell"))


def _add_commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    commands = parser.add_subparsers(
        dest="action", required=True, metavar="plan|check|explain|doctor"
    )
    plan = commands.add_parser("plan", help="layouts, collectives and bytes", allow_abbrev=False)
    plan.add_argument("--json", metavar="FILE", help="write the same as JSON")
    plan.add_argument("--graph", action="store_true", help="print the program of the ranks too")
    check = commands.add_parser(
        "check", help="simulate the ranks and compare with one device", allow_abbrev=False
    )
    check.add_argument(
        "--steps", type=_count, default=3, metavar="N", help="optimizer steps (default: 3)"
    )
    explain = commands.add_parser("explain", help="why a layout is as it is", allow_abbrev=False)
    explain.add_argument("path", help="a parameter, an input or a cell: blocks.3.mlp.up.weight")
    # It has a command line of its own; here it is listed.
    commands.add_parser("doctor", help="what works on this machine, and what is wrong")
    parsers = {"plan": plan, "check": check, "explain": explain}
    for each in parsers.values():
        _add_common(each)
    return parsers


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=_count, required=True, metavar="N", help="the number of ranks")
    add("--strategy", metavar="NAME|FILE", help="how the model is split (default: data)")
    add("--seed", type=_seed, default=0, metavar="S", help="what the script starts with (0)")
    add("--verbose", action="store_true", help="show what the script prints")
    add("script", help="the Python script")
    add("arguments", metavar="...", nargs=argparse.REMAINDER, help="the script's own arguments")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number of at least 1")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number from 0 upwards")
    return int(text)
