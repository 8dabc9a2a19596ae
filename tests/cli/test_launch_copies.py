"""A script that forgot `dc.parallelize` trains on every rank the same: that is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.jobs import LAUNCH, run

pytestmark = pytest.mark.slow

TRAINS = """
import os, sys
import torch
import distcell as dc
how = sys.argv[1]
net = torch.nn.Linear(4, 1)
if how == "parallel":
    net = dc.parallelize(net)
if how == "ddp":
    torch.distributed.init_process_group("gloo")
    net = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    net(torch.ones(2, 4)).sum().backward()
    if how != "no steps":
        optimizer.step()
if how == "ddp":
    torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["forgotten", "parallel", "ddp", "no steps"])
def test_copies_are_named_at_the_first_step_and_at_the_end(tmp_path: Path, how: str) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    done = run([*LAUNCH, "-n", "2", "--backend", "gloo", "train.py", how], tmp_path)
    assert done.returncode == 0, done.stderr
    if how != "forgotten":
        assert "warning:" not in done.stderr
        return
    line = next(n for n, text in enumerate(TRAINS.splitlines(), 1) if "optimizer.step()" in text)
    first, second = done.stderr.split("warning: ")[1:]
    assert first.startswith("2 ranks train the same model: an optimizer steps and no network is")
    assert f"train.py:{line}\n  = hint: `net = dc.parallelize(net)`" in first
    assert second.startswith("all 2 ranks trained the same model, each the whole of it\n")


def test_one_rank_is_what_a_script_without_parallel_parts_is_for(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    done = run([*LAUNCH, "train.py", "forgotten"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
