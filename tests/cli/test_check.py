"""`python -m distcell check`: exits 0 exactly when simulated ranks mean what one device means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from distcell.__main__ import main
from distcell.report.check import Comparison, check, limit_of
from distcell.report.script import Script

SCRIPT = """
import sys
import torch
import distcell as dc
from settings import WIDTH, used
used.append(1)
assert used == [1], "a second run must begin anew"

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, WIDTH), torch.nn.Linear(WIDTH, 8)
        self.norm, self.drop = torch.nn.BatchNorm1d(WIDTH), torch.nn.Dropout(0.3)

    def forward(self, x):
        return self.down(self.drop(torch.relu(self.norm(self.up(x)))))

dtype = {"f32": torch.float32, "f64": torch.float64}[sys.argv[1]]
net = dc.parallelize(Net().to(dtype))
optimizer = OPTIMIZER
for step in range(int(sys.argv[2])):
    x, y = torch.randn(7, 8, dtype=dtype), torch.randn(7, 8, dtype=dtype)
    loss = torch.nn.functional.mse_loss(net(x), y)
    loss.backward()
    BEFORE
    optimizer.step()
    optimizer.zero_grad()
    print("step", step)
"""
SGD = "torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)"
ADAM = "torch.optim.AdamW(net.parameters(), 1e-2)"

MODEL = """
import torch
import distcell as dc
from distcell import nn

class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Dense(8, 16), nn.Dense(16, 4)

    def construct(self, x):
        return self.down(torch.relu(self.up(x)))

net = Net()
data = [(torch.randn(6, 8), torch.randn(6, 4)) for _ in range(5)]
model = dc.Model(net, nn.MSELoss(), torch.optim.Adam(net.parameters(), 1e-2))
model.train(3, data)
raise RuntimeError("never reached")
"""


@pytest.fixture
def write(tmp_path: Path):
    (tmp_path / "settings.py").write_text("WIDTH, used = 16, []\n", encoding="utf-8")

    def write(text: str, optimizer: str = SGD, before: str = "pass") -> str:
        path = tmp_path / "train.py"
        text = text.replace("OPTIMIZER", optimizer).replace("BEFORE", before)
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


@pytest.mark.parametrize("strategy", ["data", "tensor", "data-tensor"])
def test_a_loop_of_ones_own_is_equal_in_double_precision(write, capsys, strategy) -> None:
    path = write(SCRIPT)
    assert main(["check", "--ranks", "4", "--strategy", strategy, path, "f64", "9"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "4 ranks simulated" in out.splitlines()[0]
    assert out.splitlines()[1] == "3 optimizer steps in f64, against one device uncaptured"
    rows = {line.split("  ")[1]: line for line in out.splitlines() if " equal  " in line}
    assert set(rows) == {
        "losses", "gradients of step 1", "gradients of later steps", "weights", "buffers",
    }  # fmt: skip
    assert all("1e-10" in row for row in rows.values())
    assert out.splitlines()[-1] == "equal"
    assert "step" not in out.splitlines()[-1]


def test_every_tensor_of_every_step_is_compared(write) -> None:
    result = check(Script(write(SCRIPT), ("f32", "9")), 2, "data", steps=4)
    counts = {comparison.kind: comparison.count for comparison in result.comparisons}
    assert counts == {
        "losses": 4,
        "gradients of step 1": 6,
        "gradients of later steps": 18,
        "weights": 24,
        "buffers": 12,
    }
    assert result.is_equal
    assert result.precision == "f32"


def test_adam_in_single_precision_says_which_eps_was_used(write, capsys) -> None:
    path = write(SCRIPT, ADAM)
    assert main(["check", "--ranks", "2", path, "f32", "9"]) == 0
    assert "AdamW had eps=1e-08; both runs used 0.001" in capsys.readouterr().out


def test_a_training_step_that_is_one_program_is_compared_too(write, capsys) -> None:
    assert main(["check", "--ranks", "4", "--strategy", "data-tensor", write(MODEL)]) == 0
    out = capsys.readouterr().out
    assert "3 optimizer steps in f32" in out
    assert [line.split()[4] for line in out.splitlines() if "gradients of" in line] == ["4", "8"]


MEDDLING = "net.up.weight.grad.mul_(1 + dc.context.launch().ranks * 1e-3)"


def test_a_gradient_that_differs_is_found_and_exits_1(write, capsys) -> None:
    # the reference sees 1 rank here and the simulation 2: a fault that only a script can plant
    path = write(SCRIPT, before=MEDDLING)
    assert main(["check", "--ranks", "2", path, "f64", "9"]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "NOT equal"
    row = next(line for line in out.splitlines() if line.startswith("  gradients of step 1"))
    assert "NOT EQUAL" in row
    assert row.endswith("up.weight, step 1")
    first_loss = next(line for line in out.splitlines() if line.startswith("  losses"))
    assert "NOT EQUAL" in first_loss, "the later losses follow"


def test_a_gradient_that_is_missing_is_found_and_named(write, capsys) -> None:
    meddling = "net.up.bias.grad = net.up.bias.grad if dc.context.launch().ranks == 1 else None"
    assert main(["check", "--ranks", "2", write(SCRIPT, before=meddling), "f64", "9"]) == 1
    out = capsys.readouterr().out
    assert "gradients of step 1 that cannot be compared" in out
    assert "up.bias, step 1: on one device alone" in out


def test_a_script_that_ends_early_says_how_much_was_compared(write, capsys) -> None:
    assert main(["check", "--ranks", "2", write(SCRIPT), "f64", "2"]) == 0
    assert "note: the script ended after 2 of 3 steps" in capsys.readouterr().out


def test_a_script_without_a_step_is_a_clear_error(write, capsys) -> None:
    assert main(["check", "--ranks", "2", write(SCRIPT), "f64", "0"]) == 2
    assert "ended without a training call of a parallel network" in capsys.readouterr().err
    path = write(SCRIPT.replace("optimizer.step()", "pass"))
    assert main(["check", "--ranks", "2", path, "f64", "2"]) == 2
    assert "ended without an optimizer step" in capsys.readouterr().err


def test_the_scripts_own_error_in_either_run_is_shown(write, capsys) -> None:
    path = write(SCRIPT, before="raise KeyError(step)")
    assert main(["check", "--ranks", "2", path, "f64", "2"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last):\n")
    assert err.endswith("KeyError: 0\n")


def test_nothing_stays_behind_in_torch(write, capsys) -> None:
    backward = torch.autograd.backward
    assert main(["check", "--ranks", "2", write(SCRIPT), "f64", "2"]) == 0
    capsys.readouterr()
    assert torch.autograd.backward is backward
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    weight.sum().backward()
    optimizer.step()
    assert weight.item() == pytest.approx(0.9)


def test_nan_and_infinity_are_never_equal_unless_they_are_the_same_infinity() -> None:
    for one, other, equal in [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), False),
        (torch.tensor([1.0, float("inf")]), torch.tensor([1.0, float("inf")]), True),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("nan")]), False),
        (torch.zeros(2), torch.zeros(2), True),
        (torch.zeros(2), torch.full((2,), 1e-30), False),
        (torch.ones(2), torch.ones(3), False),
        (torch.ones(2), torch.ones(2).double(), False),
        (torch.tensor([3]), torch.tensor([4]), False),
        (torch.ones(0), torch.ones(0), True),
    ]:
        comparison = Comparison("weights", 1e-5)
        comparison.add("w", one, other)
        assert comparison.is_equal is equal, (one, other)


def test_the_limits_are_those_of_the_design() -> None:
    assert limit_of("weights", "f64") == limit_of("gradients of later steps", "f64") == 1e-10
    assert limit_of("losses", "f32") == limit_of("gradients of step 1", "f32") == 1e-5


def test_the_largest_difference_counts_by_the_largest_magnitude_of_all_tensors() -> None:
    comparison = Comparison("weights", 1e-5)
    comparison.add("large", torch.tensor([1000.0]), torch.tensor([1000.0]))
    comparison.add("small", torch.tensor([1e-3]), torch.tensor([2e-3]))
    assert comparison.worst == "small"
    assert comparison.relative == pytest.approx(1e-6)
    assert comparison.is_equal
    json.dumps(comparison.relative)
