"""Collectives over MPI that are not waited for at once: progress, order, futures, errors."""

from __future__ import annotations

import gc
import threading
import time
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

pytestmark = pytest.mark.usefixtures("mpi4py_backend")

LONG = 300_000  # elements: more than MPI keeps until they are received


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def until(condition: object, seconds: float = 60.0) -> bool:
    """Whether it became true, without a call that could move anything on."""
    waiting = threading.Event()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        waiting.wait(0.002)
    return False


def test_a_collective_ends_though_nobody_waits() -> None:
    x = torch.ones(LONG)
    work = dist.all_reduce(x, async_op=True)
    assert until(work.is_completed)
    assert work.is_success() and (x == size()).all()


def test_a_message_ends_though_nobody_waits() -> None:
    after, before = (rank() + 1) % size(), (rank() - 1) % size()
    out = torch.empty(LONG)
    sent, received = (
        dist.isend(torch.full((LONG,), float(rank())), after),
        dist.irecv(out, before),
    )
    assert until(received.is_completed) and until(sent.is_completed)
    assert (out == before).all()


def test_work_ends_in_the_order_of_its_group() -> None:
    x = torch.ones(9001)
    works = [dist.all_reduce(x, async_op=True) for _ in range(5)]
    y = torch.ones(3)
    dist.all_reduce(y)  # waited for at once: after the five
    assert all(work.is_completed() for work in works)
    assert (x == size() ** 5).all() and (y == size()).all()


def test_one_rank_may_wait_where_another_does_not() -> None:
    x = torch.ones(9001)
    work = dist.all_reduce(x, async_op=rank() % 2 == 0)
    if work is not None:
        work.wait()
    assert (x == size()).all()


def test_work_that_nobody_keeps_is_done() -> None:
    x = torch.ones(LONG)
    dist.all_reduce(x, async_op=True)
    gc.collect()
    dist.barrier()
    assert (x == size()).all()


def test_a_future_holds_the_outputs() -> None:
    x = torch.ones(4)
    future = dist.all_reduce(x, async_op=True).get_future()
    assert future.wait()[0] is x
    outs = [torch.empty(4) for _ in range(size())]
    future = dist.all_gather(outs, x, async_op=True).get_future()
    assert [out[0].item() for out in future.wait()] == [size()] * size()


@pytest.mark.parametrize("late", [False, True])
def test_a_callback_may_issue_and_wait(late: bool) -> None:
    x, y, z = torch.ones(9001), torch.ones(3), torch.ones(5)
    first = dist.all_reduce(x, async_op=True)
    if late:
        first.wait()

    def more(future: torch.futures.Future[list[torch.Tensor]]) -> float:
        dist.all_reduce(y)
        dist.all_reduce(z, async_op=True).wait()
        return future.value()[0][0].item()

    chained = first.get_future().then(more)
    second = dist.all_reduce(x, async_op=True)  # after those of the callback, on all ranks
    assert chained.wait() in (size(), size() ** 2)
    second.wait()
    assert (y == size()).all() and (z == size()).all() and (x == size() ** 2).all()


def test_an_error_reaches_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    from distcell.runtime.mpi.transport import Transport

    def fail(*_args: object) -> None:
        raise ValueError("out of order")

    with monkeypatch.context() as patch:
        patch.setattr(Transport, "all_reduce", fail)
        work = dist.all_reduce(torch.ones(2), async_op=True)
        with pytest.raises(ValueError, match="out of order"):
            work.wait()
        assert work.is_completed() and not work.is_success()
        assert "out of order" in str(work.exception())
        with pytest.raises(ValueError, match="out of order"):
            work.get_future().wait()
        with pytest.raises(ValueError, match="out of order"):
            dist.all_reduce(torch.ones(2))
    x = torch.ones(2)
    dist.all_reduce(x)
    assert (x == size()).all()


def test_a_message_that_does_not_fit_is_an_error() -> None:
    after, before = (rank() + 1) % size(), (rank() - 1) % size()
    sending = dist.isend(torch.ones(8), after)
    with pytest.raises(RuntimeError, match=r"(?i)trunc"):
        dist.irecv(torch.empty(4), before).wait()
    sending.wait()


def test_waiting_may_be_limited() -> None:
    if size() == 1:
        return
    x = torch.ones(2)
    if rank() == 0:
        work = dist.irecv(x, 1, tag=9)
        with pytest.raises(TimeoutError):
            work.wait(timedelta(seconds=0.05))
        dist.barrier()
        work.wait()
        assert (x == 5).all()
        late = dist.all_reduce(x, async_op=True)
        with pytest.raises(TimeoutError, match="rank 1"):
            late.wait(timedelta(seconds=0.05))
        dist.send(x, 1, tag=10)
        late.wait()
    else:
        dist.barrier()
        if rank() == 1:
            dist.send(torch.full((2,), 5.0), 0, tag=9)
            dist.recv(torch.empty(2), 0, tag=10)
        dist.all_reduce(x)


def test_a_busy_rank_keeps_its_core() -> None:
    """Ranks that wait for a slower one leave the Python lock to their own threads."""
    done = threading.Event()
    counted = 0

    def count() -> None:
        nonlocal counted
        while not done.is_set():
            counted += 1

    if rank() == 0:
        threading.Event().wait(0.1)
    thread = threading.Thread(target=count)
    thread.start()
    dist.barrier()
    done.set()
    thread.join()
    assert counted > 0
