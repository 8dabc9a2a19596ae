"""`python -m distcell plan | check | explain | doctor`: look before anything runs."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from distcell.errors import DistcellError, LaunchError
from distcell.report.command_line import Command, parse
from distcell.report.script import ScriptError


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code of a command.

    Args:
        arguments: What stands behind `python -m distcell`.
    """
    try:
        if arguments[:1] == ["doctor"]:
            from distcell.launch.doctor import doctor

            return doctor(arguments[1:])
        command = parse(arguments)
        return _ACTIONS[command.action](command)
    except DistcellError as error:
        sys.stdout.flush()
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except ScriptError as error:
        sys.stdout.flush()
        if error.text:
            print(error.text, file=sys.stderr)
        return error.exit_code


def _plan(command: Command) -> int:
    from distcell.report.first_plan import first_plan
    from distcell.report.plan_text import blocks_of
    from distcell.report.summary import summarise
    from distcell.report.table import show

    found = first_plan(command.script, command.ranks, command.strategy)
    event = found.event
    summary = summarise(event.planned, found.optimizer, event.strategy.source)
    blocks = blocks_of(summary)
    if command.graph:
        blocks.append(f"program\n{event.planned.program}")
    show(blocks, sys.stdout)
    if command.json is not None:
        text = json.dumps(summary.to_json(), indent=1)
        try:
            Path(command.json).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise LaunchError(f"`{command.json}` cannot be written", where=[str(error)]) from error
    return 0


def _explain(command: Command) -> int:
    from distcell.report.explain import explain, tied_paths
    from distcell.report.first_plan import first_plan

    event = first_plan(command.script, command.ranks, command.strategy).event
    print(explain(event.planned, command.path, tied=tied_paths(event.cell)))
    return 0


def _check(command: Command) -> int:
    from distcell.report.check import check
    from distcell.report.check_text import blocks_of
    from distcell.report.table import show

    result = check(command.script, command.ranks, command.strategy, steps=command.steps)
    show(blocks_of(result), sys.stdout)
    return 0 if result.is_equal else 1


_ACTIONS: dict[str, Callable[[Command], int]] = {
    "plan": _plan,
    "check": _check,
    "explain": _explain,
}


def _run(arguments: Sequence[str]) -> int:
    """`main`, for a reader that may stop reading, as `head` does: that is no error to speak of."""
    try:
        code = main(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes what is left when it ends, and would complain then
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1:]))
