"""How the job was started, and the auto-parallel context: defaults, checks, reset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from distcell.context import (
    AutoParallelContext,
    LaunchOptions,
    auto_parallel_context,
    get_auto_parallel_context,
    launch,
    reset_auto_parallel_context,
    set_auto_parallel_context,
    set_launch,
)
from distcell.errors import LaunchError, StrategyError, UserTypeError


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = launch()
    yield
    set_launch(before)
    reset_auto_parallel_context()


def test_a_script_by_itself_runs_on_one_device() -> None:
    set_launch(LaunchOptions())
    assert (launch().mode, launch().ranks, launch().strategy) == ("eager", 1, None)


def test_what_is_set_is_what_is_read() -> None:
    options = LaunchOptions(mode="simulate", ranks=8, strategy="tensor")
    set_launch(options)
    assert launch() is options


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mode": "rank"}, "no mode `rank`\n  = hint: did you mean `ranks`"),
        ({"backend": "nccl2"}, "no backend `nccl2`\n  = hint: did you mean `nccl`"),
        ({"ranks": 0}, "0 ranks cannot run"),
        ({"stall_after": 0.0}, "a stall cannot be seen after 0.0 seconds"),
    ],
)
def test_options_that_mean_nothing_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        LaunchOptions(**wrong)


def test_settings_are_changed_one_by_one_and_reset_together() -> None:
    set_auto_parallel_context(full_batch=False)
    set_auto_parallel_context(strategy="tensor", gradients_mean=False)
    assert auto_parallel_context() == AutoParallelContext(
        strategy="tensor", gradients_mean=False, full_batch=False
    )
    assert get_auto_parallel_context("strategy") == "tensor"
    reset_auto_parallel_context()
    assert auto_parallel_context() == AutoParallelContext()


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        ({"paralel_mode": "stand_alone"}, StrategyError, "no key `paralel_mode`.*\n.*`parallel_m"),
        ({"device_num": 8}, StrategyError, "no key `device_num`.*\n.*the launcher's"),
        ({"parallel_mode": "data_paralel"}, StrategyError, "did you mean `data_parallel`"),
        ({"full_batch": 1}, UserTypeError, "`full_batch` is 1, a int; it takes bool"),
        ({"strategy": 3}, UserTypeError, "it takes str or None"),
    ],
)
def test_a_wrong_setting_changes_nothing(
    wrong: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        set_auto_parallel_context(gradients_mean=False, **wrong)
    assert auto_parallel_context() == AutoParallelContext()


def test_an_unknown_key_cannot_be_read() -> None:
    with pytest.raises(StrategyError, match="did you mean `strategy`"):
        get_auto_parallel_context("stratgy")
