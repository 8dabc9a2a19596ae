"""`python -m distcell.launch [flags] script [arguments]`."""

from __future__ import annotations

import os
import sys

from distcell.errors import DistcellError
from distcell.launch import monitor
from distcell.launch.command_line import parse
from distcell.launch.local_ranks import start_ranks
from distcell.launch.rank import run_alone, run_as_rank
from distcell.runtime.rank_environment import find_ranks


def main(arguments: list[str]) -> int:
    """Returns the exit code of the job.

    Args:
        arguments: What stands behind `python -m distcell.launch`.
    """
    try:
        found = find_ranks(os.environ)
        if found is not None and found.size > 1:
            monitor.start_rank(found.rank)
            code = run_as_rank(arguments, found)
            if code:
                monitor.say_nothing_more()
            return code
        command = parse(arguments)
        if command.ranks is not None and command.ranks > 1:
            return start_ranks(command)
    except DistcellError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    return run_alone(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
