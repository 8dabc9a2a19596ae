"""`python -m distcell.launch [flags] script [arguments]`."""

from __future__ import annotations

import os
import sys

from distcell.errors import DistcellError
from distcell.launch import monitor
from distcell.launch.command_line import parse
from distcell.launch.job_files import submit
from distcell.launch.local_ranks import start_ranks
from distcell.launch.output import Output
from distcell.launch.rank import run_alone, run_as_rank
from distcell.runtime.rank_environment import find_ranks


def main(arguments: list[str]) -> int:
    """Returns the exit code of the job.

    Args:
        arguments: What stands behind `python -m distcell.launch`.
    """
    found = None
    try:
        found = find_ranks(os.environ)
        if found is not None and found.size > 1:
            monitor.start_rank(found.rank, _output(arguments, found.rank))
            code = run_as_rank(arguments, found)
            if code:
                monitor.say_nothing_more()
            return code
        command = parse(arguments)
        if command.on is not None:
            return submit(command)
        if command.ranks is not None and command.ranks > 1:
            return start_ranks(command)
        if (output := _output(arguments, 0)) is not None:
            monitor.start_rank(0, output)
    except DistcellError as error:
        if found is None or not found.local_rank:  # one for each host, where it says so
            print(error.render(), file=sys.stderr)
        return error.exit_code
    code = run_alone(command)
    if code:
        monitor.say_nothing_more()
    return code


def _output(arguments: list[str], rank: int) -> Output | None:
    """What copies the output of a rank; None when the command does not ask for it, or is wrong."""
    try:
        command = parse(arguments)
    except DistcellError:  # it is said once, when the ranks can agree on who says it
        return None
    if not command.prefix and command.log_dir is None:
        return None
    return Output(rank, prefix=command.prefix, folder=command.log_dir)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
