"""What ranks print: marked with rank and host, and kept in files."""

from __future__ import annotations

import os
import pty
import re
import socket
import subprocess
from pathlib import Path

import pytest

from distcell.errors import LaunchError
from distcell.launch.output import COLOUR, Output, prefix_of
from tests.cli.jobs import LAUNCH, MPIRUN, environment, needs_mpi, run

PRINTS = """
import os, sys
import distcell
rank = os.environ["RANK"]
print("hello", rank, sorted(os.sched_getaffinity(0)))
os.system("echo from a child")
print("to stderr", file=sys.stderr)
sys.stdout.write("no newline")
if "kill" in sys.argv and rank == "1":
    os.kill(os.getpid(), 9)
"""

HOST = socket.gethostname()


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    (tmp_path / "prints.py").write_text(PRINTS)
    return tmp_path


def test_lines_are_copied_whole_and_what_is_left_over_waits(tmp_path, capfd):
    output = Output(4, prefix=True, folder=str(tmp_path / "new" / "logs"))
    output.write(1, b"one\ntw")
    output.write(1, b"o\r50 %\rthree")
    output.write(2, b"error\r\n")
    copied = capfd.readouterr()
    mark = f"4 {HOST} | "
    assert copied.out == f"{mark}one\n{mark}two\r{mark}50 %\r"
    assert copied.err == f"{mark}error\r\n"
    kept = (tmp_path / "new" / "logs" / "rank-4.log").read_bytes()
    assert kept == b"one\ntwo\r50 %\rerror\r\n"


def test_colours_are_for_terminals_and_no_color_is_kept():
    plain = f"2 {HOST} | ".encode()
    assert prefix_of(2, {}, False) == plain
    assert prefix_of(2, {}, True).startswith(b"\x1b[32m2 ")
    assert prefix_of(2, {COLOUR: "1"}, False) == prefix_of(2, {}, True)
    assert prefix_of(2, {COLOUR: "1", "NO_COLOR": "1"}, True) == plain


def test_a_log_that_cannot_be_written_is_one_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match=r"the log `.*rank-0.log` cannot be written"):
        Output(0, prefix=False, folder=str(tmp_path / "file"))


@needs_mpi
@pytest.mark.slow
def test_each_line_says_its_rank_and_each_rank_has_a_file(scripts):
    command = [str(MPIRUN), "-n", "2", *LAUNCH, "--prefix", "--log-dir", "logs", "prints.py"]
    done = run(command, scripts)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        mine = [line for line in done.stdout.splitlines() if line.startswith(f"{rank} {HOST} | ")]
        assert [line.split(" | ")[1].split()[0] for line in mine] == ["hello", "from", "no"]
        kept = (scripts / "logs" / f"rank-{rank}.log").read_text()
        assert set(kept.splitlines()) >= {"from a child", "to stderr", "no newline"}
        assert f"hello {rank}" in kept
    assert len(done.stdout.splitlines()) == 6
    assert sorted(done.stderr.splitlines()) == [f"{r} {HOST} | to stderr" for r in (0, 1)]


@pytest.mark.slow
def test_the_log_of_a_rank_that_is_killed_holds_all_that_it_printed_and_how_it_ended(scripts):
    command = [*LAUNCH, "-n", "2", "--backend", "gloo", "--log-dir", "logs", "prints.py", "kill"]
    done = run(command, scripts)
    assert done.returncode != 0
    kept = (scripts / "logs" / "rank-1.log").read_text()
    assert "to stderr\n" in kept
    assert "was ended by SIGKILL" in kept
    assert done.stderr.count("was ended by SIGKILL") == 1


@pytest.mark.slow
def test_a_single_rank_is_marked_and_kept_too(scripts):
    done = run([*LAUNCH, "--prefix", "--log-dir", "logs", "prints.py"], scripts)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 3), done.stderr
    assert done.stdout.startswith(f"0 {HOST} | hello 0")
    assert (scripts / "logs" / "rank-0.log").read_text().startswith("hello 0")


@pytest.mark.slow
def test_on_a_terminal_the_marks_have_colours_and_the_lines_have_none(scripts):
    ours, theirs = pty.openpty()
    command = [*LAUNCH, "-n", "2", "--prefix", "prints.py"]
    with subprocess.Popen(command, cwd=scripts, env=environment(), stdout=theirs, stderr=theirs):
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 4096)
            except OSError:  # all have closed it
                break
    os.close(ours)
    assert re.search(rb"\x1b\[33m1 \S+ \|\x1b\[0m hello 1", shown)


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_bound_ranks_have_cores_of_their_own(scripts):
    done = run([*LAUNCH, "-n", "2", "--backend", "gloo", "--bind", "prints.py"], scripts)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"hello \d \[(.*?)\]", done.stdout)
    one, two = (set(cores.split(", ")) for cores in found)
    assert one
    assert not one & two


@pytest.mark.slow
def test_more_ranks_than_cores_cannot_be_bound(scripts):
    ranks = str(len(os.sched_getaffinity(0)) + 1)
    done = run([*LAUNCH, "-n", ranks, "--backend", "gloo", "--bind", "prints.py"], scripts)
    assert done.returncode == 2
    assert done.stderr.count(f"error: --bind: {ranks} ranks share") == 1
