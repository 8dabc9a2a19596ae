"""What the launcher reads from flags and environment; no process is started."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distcell.errors import LaunchError, RankMismatchError, StrategyError
from distcell.launch.agreement import check_agreement, describe
from distcell.launch.command_line import Command, flags, parse
from distcell.launch.deadlock import stuck_ranks
from distcell.launch.standing import Standing, Waiting
from distcell.launch.threads import core_quota, own_cores, threads_for
from distcell.launch.watchdog import stall_error
from distcell.runtime.rank_environment import RankEnvironment, find_ranks


def test_the_flags_are_these_and_no_others():
    assert flags() == [
        "--backend",
        "--bind",
        "--dry-run",
        "--help",
        "--image",
        "--log-dir",
        "--nodes",
        "--on",
        "--prefix",
        "--seed",
        "--simulate",
        "--stall-after",
        "--strategy",
        "--threads",
        "-h",
        "-n",
    ]


def test_what_stands_behind_the_script_is_the_scripts():
    command = parse(["--seed", "3", "train.py", "--strategy", "x", "-n", "4"])
    assert command == Command("train.py", ("--strategy", "x", "-n", "4"), seed=3)


def test_the_ranks_get_the_same_command_without_the_number_of_ranks():
    flags = ["--strategy", "tensor", "--threads", "2", "--stall-after", "9", "--bind", "--prefix"]
    command = parse(["-n", "4", *flags, "--log-dir", "logs", "--backend", "mpi", "t.py", "--a"])
    assert parse(command.for_ranks()) == replace(command, ranks=None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "0", "t.py"], "`0` is not a number of at least 1"),
        (["-n", "x", "t.py"], "`x` is not a number of at least 1"),
        (["--threads", "0", "t.py"], "`0` is not a number of at least 1"),
        (["--seed", "-1", "t.py"], "expected one argument|not a whole number"),
        (["--stall-after", "0", "t.py"], "not a number of seconds above 0"),
        (["--stall-after", "nan", "t.py"], "not a number of seconds above 0"),
        (["--strateg", "tensor", "t.py"], "no flag `--strateg`\n.*`--strategy`"),
        (["--backend", "mpl", "t.py"], "invalid choice: 'mpl'"),
        (["-n", "2", "--simulate", "2", "t.py"], "leave one of the two out"),
        (["--seed", "1"], "no script to run"),
    ],
)
def test_a_wrong_command_line_is_one_clear_error(arguments, message):
    with pytest.raises(LaunchError, match=message):
        parse(arguments)


def test_a_script_that_is_not_there_is_named_with_the_closest(tmp_path: Path):
    (tmp_path / "train.py").touch()
    with pytest.raises(LaunchError, match=r"did you mean .*train\.py"):
        Command(str(tmp_path / "trian.py")).check(2)


def test_a_strategy_that_is_not_there_is_an_error_before_ranks_start(tmp_path: Path):
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(StrategyError, match="did you mean `tensor`"):
        Command(str(script), strategy="tensr").check(2)


def test_a_strategy_for_another_number_of_ranks_is_an_error_before_they_start(tmp_path: Path):
    script, strategy = tmp_path / "train.py", tmp_path / "s.yaml"
    script.touch()
    strategy.write_text("distcell: 1\nmesh: {dp: 2, tp: 3}\n")
    Command(str(script), strategy=str(strategy)).check(6)
    with pytest.raises(StrategyError):
        Command(str(script), strategy=str(strategy)).check(4)


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}
TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none",
}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        (OPEN_MPI, RankEnvironment("Open MPI", 1, 4, 1, 2)),
        (MPICH, RankEnvironment("MPICH", 2, 4, 0, 2)),
        (SLURM, RankEnvironment("Slurm", 3, 4, 1, None)),
        (TORCHRUN, RankEnvironment("torchrun", 0, 2, 0, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, RankEnvironment("torchrun", 1, 2)),
        (MPICH | TORCHRUN, RankEnvironment("torchrun", 0, 2, 0, 2)),
        (SLURM | OPEN_MPI, RankEnvironment("Open MPI", 1, 4, 1, 2)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),
        ({}, None),
    ],
)
def test_the_rank_is_found_whatever_started_it(environ, found):
    assert find_ranks(environ) == found


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' in the environment is not a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is not below WORLD_SIZE=2"),
    ],
)
def test_a_broken_environment_is_named(environ, message):
    with pytest.raises(LaunchError, match=message):
        find_ranks(environ)


def test_ranks_share_the_cores_of_a_host_unless_they_are_bound():
    eight = list(range(8))
    assert threads_for(eight, [eight] * 2, math.inf) == 4
    assert threads_for(eight, [eight] * 16, math.inf) == 1
    assert threads_for([0, 1], [[0, 1], [2, 3]], math.inf) == 2
    assert threads_for(eight, [eight] * 2, 2.0) == 1
    assert core_quota("150000 100000") == 1.5


def test_bound_ranks_divide_the_cores_that_they_share():
    eight = list(range(8))
    assert [own_cores(eight, [eight] * 3, place) for place in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert own_cores([4, 5], [[0, 1], [4, 5], [4, 5]], 2) == [5]
    with pytest.raises(LaunchError, match="--bind: 9 ranks share 8 cores"):
        own_cores(eight, [eight] * 9, 0)


def described(**changes: object) -> dict[str, object]:
    return {
        "script": "/t.py",
        "content": "aa",
        "arguments": "",
        "strategy": "data",
        "strategy content": "bb",
        "seed": 0,
    } | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"script": "/u.py"}, r"different scripts\n.*ranks 0, 2: /t.py\n.*rank 1: /u.py"),
        ({"content": "cc"}, "different contents of the script"),
        ({"arguments": "--lr 1"}, "rank 1: --lr 1"),
        ({"strategy": ""}, "rank 1: none given"),
        ({"strategy content": "cc"}, "different contents of the strategy"),
        ({"seed": 1}, "different seeds"),
    ],
)
def test_ranks_that_were_started_differently_are_told_in_what(changes, message):
    check_agreement([described()] * 3)
    with pytest.raises(RankMismatchError, match=message):
        check_agreement([described(), described(**changes), described()])


def test_a_rank_describes_the_content_of_script_and_strategy(tmp_path: Path):
    script = tmp_path / "t.py"
    script.write_text("a = 1")
    one = describe(Command(str(script), strategy="data"))
    script.write_text("a = 2")
    two = describe(Command(str(script), strategy="tensor"))
    assert one["content"] != two["content"]
    assert one["strategy content"] != two["strategy content"]


def waiting(kind: str = "all_reduce", *, turn: int = 3, line: str = "dp", **more: Any) -> Standing:
    group = more.pop("group", (0, 1))
    waits = Waiting("", 2.0, kind, more.pop("nbytes", 8), group, line, turn)
    return Standing(waits, turns={line: turn, **more.pop("turns", {})}, **more)


GONE = Standing(left=True, turns={"dp": 2})


@pytest.mark.parametrize(
    ("standings", "stuck"),
    [
        ([waiting(), waiting()], []),
        ([waiting(), None], []),
        ([waiting(), Standing(left=True, turns={"dp": 3})], []),
        ([waiting(), GONE], [0]),
        ([GONE, waiting("permute")], [1]),
        ([waiting(), waiting("all_gather")], [0, 1]),
        ([waiting(), waiting(nbytes=16)], [0, 1]),
        ([waiting("all_gather"), waiting("all_gather", nbytes=16)], []),
        ([waiting(), waiting(line="tp", turns={"dp": 2})], [0, 1]),
        ([waiting(), waiting(line="tp", turns={"dp": 3})], []),  # rank 0 goes on, to rank 1
        # rank 1 waits for rank 2, which computes: it will come, and then go on to rank 0
        (
            [
                waiting(group=(0, 1)),
                waiting(group=(1, 2), line="tp", turns={"dp": 2}),
                None,
            ],
            [],
        ),
        # the same, but rank 2 has left
        (
            [
                waiting(group=(0, 1)),
                waiting(group=(1, 2), line="tp", turns={"dp": 2}),
                GONE,
            ],
            [0, 1],
        ),
        # a message may come from rank 2 alone, whatever rank 0 does
        (
            [
                waiting(group=(0, 1)),
                waiting("permute", group=(0, 1, 2), line="pp", turns={"dp": 2}),
                None,
            ],
            [],
        ),
    ],
)
def test_ranks_are_stuck_exactly_when_what_they_wait_for_cannot_come(standings, stuck):
    assert stuck_ranks(standings) == stuck


def test_a_stall_says_where_each_rank_is():
    error = stall_error(
        "a collective did not finish within 5 s",
        [
            Standing(Waiting("#2 all_reduce over dp, 8 bytes", 5.2)),
            Standing(last="#1 barrier", at="t.py:3 in step"),
            Standing(left=True),
            None,
        ],
    )
    assert str(error) == (
        "a collective did not finish within 5 s\n"
        "  |  rank 0 waits for 5 s in #2 all_reduce over dp, 8 bytes\n"
        "  |  rank 1 is in no collective, but at t.py:3 in step; its last was #1 barrier\n"
        "  |  rank 2 has left the script\n"
        "  |  rank 3 does not answer\n"
        "  = hint: look at what rank 1, 2, 3 does instead; --stall-after S waits longer"
    )
