"""Planning large models, and starting ranks: seconds and memory, each in a fresh process."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import Row, quartiles
from benchmarks.model import SMALL, Size

ROOT = Path(__file__).parents[1]
STRATEGY = "data-tensor"
START_S = 10.0
"""What starting the ranks may take beyond planning."""


@dataclass(frozen=True)
class Limits:
    """What planning a model may take at most."""

    layers: int
    seconds: float
    gigabytes: float | None = None


LIMITS = (Limits(12, 10.0), Limits(48, 25.0, 1.5))


def measure(ranks: int, repetitions: int, *, small: bool = False) -> list[Row]:
    """The rows: seconds and gigabytes beside what they should be at most.

    There is no peer: the ratio is the figure by its limit.

    Args:
        ranks: For how many ranks is planned, and how many are started.
        repetitions: How many processes each figure is taken from.
        small: Only a tiny model: for trying the command.
    """
    rows, seconds_of = [], {}
    limits = (Limits(SMALL.layers, 10.0),) if small else LIMITS
    for limit in limits:
        found = [_planned(limit.layers, ranks) for _ in range(repetitions)]
        case = f"plan/{limit.layers}-layers/{ranks}"
        seconds = [figures["seconds"] for figures in found]
        seconds_of[limit.layers] = statistics.median(seconds)
        rows.append(_row(case, "seconds", seconds, limit.seconds))
        if limit.gigabytes is not None:
            peaks = [figures["gigabytes"] for figures in found]
            rows.append(_row(case, "gigabytes", peaks, limit.gigabytes))
    layers, planning = next(iter(seconds_of.items()))
    starts = [_started(layers, ranks) for _ in range(repetitions)]
    rows.append(_row(f"start/{layers}-layers/{ranks}", "seconds", starts, planning + START_S))
    return rows


def _row(case: str, unit: str, figures: list[float], limit: float) -> Row:
    low, ratio, high = quartiles([figure / limit for figure in figures])
    median = statistics.median(figures)
    ours, peer = f"{median:.2f} {unit}", f"at most {limit:.2f} {unit}"
    load = os.getloadavg()[0]
    return Row(case, ours, peer, ratio, low, high, limit=1.0, pairs=len(figures), load=load)


def _planned(layers: int, ranks: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.plan", str(layers), str(ranks)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _started(layers: int, ranks: int) -> float:
    """Seconds from the command to the end of the first step on all ranks."""
    from distcell.runtime.mpi_installation import find_mpirun

    mpirun = find_mpirun()
    if mpirun is None:
        raise RuntimeError("there is no mpirun: pip install 'distcell[mpi]'")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "seconds"
        start = [str(mpirun), "-n", str(ranks), sys.executable, "-m", "distcell.launch"]
        start += ["--strategy", STRATEGY, str(Path(__file__).with_name("first_step.py"))]
        began = time.time()
        subprocess.run([*start, str(layers), str(file)], cwd=ROOT, check=True, env=_environment())
        return float(file.read_text(encoding="ascii")) - began


def _environment() -> dict[str, str]:
    """As on most machines: what Python compiled once is kept, not compiled again by each rank."""
    return {key: text for key, text in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}


def plan_once(layers: int, ranks: int) -> dict[str, float]:
    """Captures, propagates and partitions a training step with SGD in this process."""
    import resource

    import torch

    from benchmarks.model import make_batches, make_gpt
    from distcell.capture import capture_step
    from distcell.engine.garbage import collector_paused
    from distcell.engine.planning import plan_graph
    from distcell.mesh import Mesh
    from distcell.strategy import load_strategy

    size = SMALL if layers == SMALL.layers else Size(layers=layers)
    gpt = make_gpt(size)
    optimizer = torch.optim.SGD(gpt.parameters(), lr=0.01)
    batch = make_batches(size, 8)[0]
    strategy = load_strategy(STRATEGY)
    began = time.perf_counter()
    with collector_paused():
        captured = capture_step(gpt, lambda net, *batch: net(*batch), optimizer, batch, {})
        groups: dict[str, list[str]] = {}
        for other, first in captured.tied.items():
            groups.setdefault(first, [first]).append(other)
        mesh = Mesh(strategy.mesh_for(ranks))
        plan_graph(captured.graph, gpt, strategy, mesh, tied=groups.values())
    seconds = time.perf_counter() - began
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": seconds, "gigabytes": kilobytes * 1024 / 1e9}


if __name__ == "__main__":
    print(json.dumps(plan_once(*map(int, sys.argv[1:]))))
