"""What all tests share: pinned threads, `--all`, and one report for all ranks.

Under `mpirun -n N python -m pytest --with-mpi`, every rank runs every test. After each phase of a
test the ranks exchange their outcomes: a failure on any rank fails the test on all of them, with
each failing rank's message, and rank 0 alone prints. A rank that fails while the others wait in a
collective takes the job down after a short grace, its own message first.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

# Before torch is imported: a reduction's bits depend on the number of threads.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

_TESTS = Path(__file__).parent
_GRACE_S = 20.0
"""How long a rank that failed waits for the others, who may be slower."""

_RANKS_TIMEOUT_S = 180.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="run the whole matrix, not a covering set of it"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    settings.register_profile("here", deadline=None)
    settings.register_profile("ranks", deadline=None, derandomize=True, database=None)
    ranks = _Ranks.of(config)
    # All ranks must draw the same examples, or they would wait for each other for ever.
    settings.load_profile("ranks" if ranks else "here")
    if ranks:
        # A signal is not delivered inside an MPI call; the timer thread is, and ends the process.
        config.option.timeout_method = "thread"
        config.option.timeout = config.option.timeout or _RANKS_TIMEOUT_S
        config.pluginmanager.register(ranks, "distcell-ranks")


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    ranks = session.config.pluginmanager.get_plugin("distcell-ranks")
    if ranks is not None and ranks.rank != 0:
        session.config.get_terminal_writer()._file = Path(os.devnull).open("w")  # noqa: SIM115


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(_TESTS).parts[0]
        if folder == "ranks":
            item.add_marker(pytest.mark.ranks)
            item.add_marker(pytest.mark.mpi)
        if folder == "gpu":
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not _has_cuda():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if not config.getoption("--all"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    # Only where torch is used already: importing it takes longer than most tests without it.
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def whole_matrix(request: pytest.FixtureRequest) -> bool:
    """Whether `--all` was given."""
    return bool(request.config.getoption("--all"))


class _Ranks:
    """Exchanges outcomes between the ranks of one test session."""

    def __init__(self, comm: Any) -> None:
        # A communicator of its own: a test's messages and ours must not meet.
        self.comm = comm.Dup()
        self.rank: int = comm.rank

    @classmethod
    def of(cls, config: pytest.Config) -> _Ranks | None:
        """Returns the exchange when the session runs on several ranks."""
        if not config.getoption("--with-mpi"):
            return None
        from mpi4py import MPI

        return cls(MPI.COMM_WORLD) if MPI.COMM_WORLD.size > 1 else None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed:
            self._wait_or_abort(item, report)
        else:
            self.comm.Ibarrier().Wait()  # a Barrier would not meet the Ibarrier of who failed
        mine = (report.outcome, report.longreprtext)
        outcomes = self.comm.allgather(mine)
        kinds = {outcome for outcome, _ in outcomes}
        if kinds == {report.outcome} and report.outcome != "failed":
            return report
        # The same outcome everywhere: `-x` and failed set-ups then stop all ranks at the same test.
        report.outcome = "failed"
        worst = "failed" if "failed" in kinds else "skipped"
        named = [str(rank) for rank, (outcome, _) in enumerate(outcomes) if outcome == worst]
        report.longrepr = "\n".join(
            [f"{worst} on rank {', '.join(named)} of {len(outcomes)}"]
            + [f"rank {r}:\n{text}" for r, (kind, text) in enumerate(outcomes) if kind == worst]
        )
        return report

    def _wait_or_abort(self, item: pytest.Item, report: pytest.TestReport) -> None:
        request = self.comm.Ibarrier()
        deadline = time.monotonic() + _GRACE_S
        while not request.Test():
            if time.monotonic() > deadline:
                text = f"\nrank {self.rank}: {item.nodeid} failed, others wait in a collective\n"
                os.write(2, (text + report.longreprtext + "\n").encode())
                self.comm.Abort(1)
            time.sleep(0.001)

    def pytest_internalerror(self, excrepr: object) -> None:
        os.write(2, f"\nrank {self.rank}: {excrepr}\n".encode())
        self.comm.Abort(1)
