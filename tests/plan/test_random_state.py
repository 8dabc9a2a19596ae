"""Which key a call gets: seed, optimizer steps, and calls since."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from distcell.errors import CheckpointError
from distcell.random import RandomState, current_state, seed


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    seed(3)
    yield
    seed(None)


def keys(count: int, *, training: bool = True) -> list[list[int]]:
    return [current_state().next_key(training=training).tolist() for _ in range(count)]


def step() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.SGD([weight]).step()


def test_calls_count_from_each_step_of_any_optimizer() -> None:
    assert keys(2) == [[3, 0, 0], [3, 0, 1]]
    step()
    assert keys(2) == [[3, 1, 0], [3, 1, 1]]
    step()
    step()
    assert keys(1) == [[3, 3, 0]]


def test_evaluation_does_not_change_the_training() -> None:
    assert keys(1) == [[3, 0, 0]]
    assert keys(2, training=False) == [[3, 0, -1], [3, 0, -2]]
    assert keys(1) == [[3, 0, 1]]
    step()
    assert keys(1, training=False) == [[3, 1, -1]]


def test_seeding_begins_anew() -> None:
    keys(2)
    step()
    seed(4)
    assert keys(1) == [[4, 0, 0]]


def test_without_a_seed_it_is_that_of_torch() -> None:
    seed(None)
    with torch.random.fork_rng():
        torch.manual_seed(17)
        assert keys(1) == [[17, 0, 0]]
        torch.manual_seed(-2)
        assert keys(1) == [[-2, 0, 1]]


def test_a_state_goes_on_where_it_was_saved() -> None:
    keys(2)
    step()
    keys(2)
    saved = current_state().state_dict()
    after = keys(2)
    other = RandomState()
    other.load_state_dict(saved)
    assert [other.next_key().tolist() for _ in range(2)] == after


@pytest.mark.parametrize("change", [{"step": "1"}, {"step": None}, {"extra": 1}])
def test_a_state_of_another_form_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="not a state of random numbers"):
        RandomState().load_state_dict(RandomState().state_dict() | change)
    with pytest.raises(CheckpointError, match="not a state of random numbers"):
        RandomState().load_state_dict({})


def test_what_is_traced_does_not_count() -> None:
    keys(1)
    with current_state().held():
        keys(3)
        step()
    assert keys(1) == [[3, 0, 1]]


def test_a_step_that_is_not_of_torch_is_counted_by_hand() -> None:
    keys(1)
    current_state().optimizer_stepped()
    assert keys(1) == [[3, 1, 0]]
