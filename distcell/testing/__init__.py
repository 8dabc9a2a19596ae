"""Plans and simulations for tests of one's own: no ranks, no launcher.

`plan` decides, `simulate` runs what was decided for all ranks by value, and `assert_one_meaning`
compares that with one device. Under pytest the fixtures `assert_one_meaning` and `simulated_ranks`
are there without an import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from distcell.context import LaunchOptions, launch, reset_auto_parallel_context, set_launch
from distcell.strategy import Strategy
from distcell.testing.equality import assert_one_meaning
from distcell.testing.network_plan import Inputs, NetworkPlan, plan, strategy_of
from distcell.testing.simulation import Simulation, simulate

__all__ = ["Inputs", "NetworkPlan", "Simulation", "assert_one_meaning", "plan", "simulate"]

try:
    import pytest
except ModuleNotFoundError:  # no dependency of ours: who has no pytest has no use for fixtures
    pass
else:

    @pytest.fixture(name="assert_one_meaning")
    def _assert_one_meaning() -> Callable[..., Simulation]:
        """The function `distcell.testing.assert_one_meaning`."""
        return assert_one_meaning

    @pytest.fixture
    def simulated_ranks(tmp_path: Path) -> Iterator[Callable[..., None]]:
        """A function after which calls of parallel Cells run on simulated ranks, to the test's end.

        It takes the number of ranks, and a strategy as `plan` does.
        """
        before = launch()

        def start(ranks: int, strategy: str | Path | Strategy = "data") -> None:
            found = strategy_of(strategy)
            file = tmp_path / "strategy.yaml"
            file.write_text(found.to_yaml(), encoding="utf-8")
            set_launch(LaunchOptions(mode="simulate", ranks=ranks, strategy=str(file)))

        yield start
        set_launch(before)
        reset_auto_parallel_context()
