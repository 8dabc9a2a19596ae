"""`python -m distcell doctor`: what it finds, what it calls wrong, and its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distcell.errors import BackendError, LaunchError
from distcell.launch import doctor as doctor_module
from distcell.launch.doctor import Findings, blocks_of, doctor, examine_alone, problems_of_ranks
from distcell.report.table import render
from distcell.runtime.mpi_installation import (
    Mpi,
    check_launcher,
    check_that_they_match,
    find_mpirun,
    named,
)

ROOT = Path(__file__).parents[2]
MPIRUN = find_mpirun()
DOCTOR = [sys.executable, "-m", "distcell", "doctor"]
PATIENCE_S = 240

needs_mpi = pytest.mark.skipif(MPIRUN is None, reason="no mpirun")

MPICH = Mpi("MPICH", "5.0.2", "/env/lib/libmpi.so.12")
OPEN_MPI = Mpi("Open MPI", "5.0.11", "/usr/lib/libmpi.so.40")


def rank(**changes: object) -> dict[str, object]:
    versions = {"python": "3.11.7", "torch": "2.13.0"}
    return {
        "versions": versions,
        "host": "a",
        "cores": 4,
        "quota": None,
        "threads": 2,
        "shared": 1 << 30,
        "devices": 0,
        "resolves": True,
    } | changes


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to", "Open MPI 5.0.11"),
        ("Open MPI v4.1.6, package: Debian OpenMPI", "Open MPI 4.1.6"),
        ("HYDRA build details:\n    Version:      5.0.2\n", "MPICH 5.0.2"),
        ("MPICH Version:      4.3.0\nMPICH Release date:", "MPICH 4.3.0"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build", "Intel MPI 2021.13"),
        ("something", "an unknown MPI"),
    ],
)
def test_an_mpi_is_known_by_what_it_says(text, found):
    assert str(named(text, "")) == found


def test_an_mpirun_and_a_library_of_one_family_belong_together():
    check_that_they_match(Mpi("Intel MPI", "2021.13", ""), MPICH)
    check_that_they_match(Mpi("an unknown MPI", "", ""), MPICH)
    check_that_they_match(Mpi("Open MPI", "5.0.6", ""), OPEN_MPI)


@pytest.mark.parametrize(
    ("mpirun", "library", "message"),
    [
        (OPEN_MPI, MPICH, r"mpirun is Open MPI, .* is MPICH\n(.*\n)*.*/env/bin/mpirun"),
        (MPICH, OPEN_MPI, r"mpirun is MPICH, .* is Open MPI\n(.*\n)*.*/usr/bin/mpirun"),
        (Mpi("Open MPI", "4.1.6", ""), OPEN_MPI, "mpirun is Open MPI 4.1.6, .* is Open MPI 5.0.11"),
    ],
)
def test_two_mpis_mixed_are_an_error_that_says_how_to_mend_it(mpirun, library, message):
    with pytest.raises(BackendError, match=message):
        check_that_they_match(mpirun, library)


def test_a_library_is_not_initialised_under_another_mpis_mpirun():
    check_launcher("MPICH", Mpi("Intel MPI", "", ""))
    check_launcher("Slurm", OPEN_MPI)
    check_launcher("torchrun", MPICH)
    for launcher, library in (("Open MPI", MPICH), ("MPICH", OPEN_MPI)):
        with pytest.raises(BackendError, match=f"mpirun of {launcher} started the ranks"):
            check_launcher(launcher, library)


def test_ranks_that_are_alike_have_no_problem():
    assert problems_of_ranks([rank(), rank(), rank(host="b")]) == []
    assert problems_of_ranks([]) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"versions": {"python": "3.11.7", "torch": "2.12.1"}},
            "different versions of torch\n  |  2.13.0: rank 0 on a\n  |  2.12.1: rank 1 on b",
        ),
        ({"shared": 1 << 20}, "b has 1.0 MiB of shared memory free for 1 ranks"),
        ({"resolves": False}, "b does not know an address of its own name"),
    ],
)
def test_a_host_that_differs_or_lacks_something_is_named(changes, message):
    (problem,) = problems_of_ranks([rank(), rank(host="b", **changes)])
    assert message in str(problem)
    assert problem.hint


def examined(monkeypatch, mpirun: Mpi | None, library: Mpi | BackendError) -> Findings:
    def mpi_library() -> Mpi:
        if isinstance(library, BackendError):
            raise library
        return library

    path = None if mpirun is None else Path(mpirun.path)
    monkeypatch.setattr(doctor_module, "find_mpirun", lambda: path)
    monkeypatch.setattr(doctor_module, "mpirun_at", lambda path: mpirun)
    monkeypatch.setattr(doctor_module, "mpi_library", mpi_library)
    probed = {"ranks": [rank(), rank()], "seconds": {"gloo": 0.001, "mpi": 0.0005}}
    monkeypatch.setattr(doctor_module, "_probe", lambda backend, ranks: probed)
    return examine_alone(2)


NO_LIBRARY = BackendError("mpi4py finds no MPI library", hint="install one")


def test_without_any_mpi_gloo_carries_on_and_nothing_is_wrong(monkeypatch):
    findings = examined(monkeypatch, None, NO_LIBRARY)
    assert findings.problems == []
    assert findings.backends["mpi"].startswith("no MPI: pip install 'distcell[mpi]'")
    text = render(blocks_of(findings))
    assert "gloo  1.00 ms" in text
    assert text.endswith("all is well")


@pytest.mark.parametrize(
    ("mpirun", "library", "message"),
    [
        (OPEN_MPI, MPICH, "mpirun is Open MPI"),
        (OPEN_MPI, NO_LIBRARY, "mpi4py finds no MPI library"),
        (None, MPICH, "there is an MPI library, and no mpirun"),
    ],
)
def test_half_an_mpi_is_a_problem_and_is_not_started(monkeypatch, mpirun, library, message):
    findings = examined(monkeypatch, mpirun, library)
    assert [message in problem.message for problem in findings.problems] == [True]
    assert findings.backends["mpi"] == "see below"
    assert render(blocks_of(findings)).endswith("1 thing to mend")


def test_a_backend_that_fails_is_a_problem_and_the_others_are_still_timed(monkeypatch):
    examined(monkeypatch, MPICH, MPICH)

    def probe(backend: str, ranks: int) -> dict[str, object]:
        if backend == "mpi":
            raise LaunchError("2 ranks over mpi fail")
        return {"ranks": [rank(), rank()], "seconds": {"gloo": 0.001}}

    monkeypatch.setattr(doctor_module, "_probe", probe)
    findings = examine_alone(2)
    assert findings.backends["mpi"] == "fails"
    assert findings.backends["gloo"] == 0.001
    assert len(findings.problems) == 1


@pytest.mark.parametrize("arguments", [["-n", "1"], ["-n", "x"], ["--ranks", "2"]])
def test_a_wrong_command_line_is_one_clear_error(arguments):
    with pytest.raises(LaunchError):
        doctor(arguments)


def run(command: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PMI")}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=kept | more,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@needs_mpi
@pytest.mark.slow
def test_started_alone_it_times_an_all_reduce_on_each_backend():
    done = run(DOCTOR)
    assert (done.returncode, done.stderr) == (0, "")
    assert "all-reduce of 1 MiB on 2 ranks, median\n  mpi " in done.stdout
    assert done.stdout.count(" ms\n") >= 2
    assert done.stdout.endswith("all is well\n")


@needs_mpi
@pytest.mark.slow
def test_under_mpirun_it_looks_at_the_ranks_that_are_there():
    done = run([str(MPIRUN), "-n", "3", *DOCTOR])
    assert (done.returncode, done.stderr) == (0, "")
    assert "all-reduce of 1 MiB on 3 ranks" in done.stdout
    assert done.stdout.count("versions\n") == 1


@needs_mpi
@pytest.mark.slow
def test_a_library_that_is_not_there_is_a_problem_and_exit_code_2(tmp_path):
    done = run(DOCTOR, MPI4PY_LIBMPI=str(tmp_path / "libmpi.so"))
    assert done.returncode == 2
    assert "error: mpi4py finds no MPI library" in done.stdout
    assert "  gloo  " in done.stdout
