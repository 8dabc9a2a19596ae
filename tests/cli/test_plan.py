"""`python -m distcell plan`: what it prints, and the errors that a user meets."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distcell.__main__ import main
from distcell.report.command_line import flags
from distcell.report.figures import Spread, human
from distcell.report.fold import fold
from distcell.report.table import Table, render, show

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
import torch
import distcell as dc

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)
        self.drop = torch.nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(torch.relu(self.up(x))))

class Net(torch.nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(depth)))

    def forward(self, x, target):
        return torch.nn.functional.mse_loss(self.blocks(x), target)

batch, steps = int(sys.argv[1]), 4
net = dc.parallelize(Net(3))
print("the script speaks")
optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
for step in range(steps):
    loss = net(torch.randn(batch, 8), torch.randn(batch, 8))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

NEVER = """
import torch
import distcell as dc
net = dc.parallelize(torch.nn.Linear(2, 2))
{call}
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return str(path)


def test_the_plan_shows_mesh_parameters_collectives_and_bytes(script, capsys) -> None:
    assert main(["plan", "--ranks", "4", "--strategy", "data-tensor", script, "8"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "the script speaks" not in out
    first = "mesh dp=2 tp=2     4 ranks     strategy strategies/data-tensor.yaml"
    assert out.splitlines()[0] == first
    assert out.split("\n\n")[1:4] == [EXPECTED_PARAMETERS, EXPECTED_COLLECTIVES, EXPECTED_BYTES]
    assert "0.2500 of it (1/4 = 0.2500)" in out
    assert "ops without a rule (they run replicated): none" in out
    assert "uneven dims: none" in out


EXPECTED_PARAMETERS = """\
parameters
  name                        type           bytes per rank  one device
  blocks.0-2.up.weight    x3  f32[32@tp, 8]           512 B     1.0 KiB
  blocks.0-2.up.bias      x3  f32[32@tp]               64 B       128 B
  blocks.0-2.down.weight  x3  f32[8, 32@tp]           512 B     1.0 KiB
  blocks.0-2.down.bias    x3  f32[8]                   32 B        32 B"""

# 4 of 8 rows, 8 wide, 4 bytes: 128 for each sum over tp; 3 * (512 + 64 + 512 + 32) of gradients
EXPECTED_COLLECTIVES = """\
collectives of one step
  phase     kind        axes  count  bytes per rank
  forward   all_reduce  tp        3           384 B
  backward  all_reduce  tp        2           256 B
  forward   all_reduce  dp        1             4 B
  backward  all_reduce  dp        1         3.3 KiB
  in all                tp        5           640 B
  in all                dp        2         3.3 KiB"""

# saved on one device: what enters blocks 1 and 2, three times 8 * 32 after relu, three masks and
# what leaves the last block: 512 + 3072 + 768 + 256 bytes
EXPECTED_BYTES = """\
bytes of one step
                             bytes per rank  one device
  parameters                        3.3 KiB     6.5 KiB
  inputs                              256 B       512 B
  gradients                         3.3 KiB     6.5 KiB
  optimizer state (SGD)             3.3 KiB     6.5 KiB
  saved for backward                1.5 KiB     4.5 KiB
  activations at their peak         3.5 KiB     6.3 KiB
  all together at the peak         13.4 KiB    21.8 KiB"""


def test_a_plan_for_64_ranks_says_what_the_worst_rank_holds(script, tmp_path, capsys) -> None:
    file = tmp_path / "plan.json"
    code = main(["plan", "--ranks", "64", "--json", str(file), script, "65"])
    assert code == 0
    assert "uneven dims" in capsys.readouterr().out
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["mesh"] == "dp=64"
    assert content["memory"]["inputs"] == {
        "least": 2 * 8 * 4, "most": 4 * 8 * 4, "worst": 0, "one_device": 65 * 2 * 8 * 4,
    }  # fmt: skip
    assert content["optimizer"] == "SGD"
    one = content["memory"]["parameters"]
    assert content["memory"]["optimizer"] == one == content["memory"]["gradients"]
    gradients = next(g for g in content["groups"] if g["phase"] == "backward")
    assert gradients["bytes"]["most"] == one["most"]
    assert len(content["collectives"][0]["bytes"]) == 64


def test_the_program_is_printed_when_asked_for(script, capsys) -> None:
    assert main(["plan", "--ranks", "2", "--graph", script, "8"]) == 0
    out = capsys.readouterr().out
    assert "%mse_loss~" in out
    assert "distcell.all_reduce" in out
    assert "= grad blocks.0.up.weight" in out


def test_what_the_script_prints_is_shown_when_asked_for(script, capsys) -> None:
    assert main(["plan", "--ranks", "2", "--verbose", script, "8"]) == 0
    assert "the script speaks" in capsys.readouterr().out


def test_an_evaluation_before_training_runs_and_does_not_end_the_script(tmp_path, capsys) -> None:
    path = tmp_path / "evaluates.py"
    path.write_text(
        "import torch, distcell as dc\n"
        "net = dc.parallelize(torch.nn.Linear(4, 4))\n"
        "with torch.no_grad():\n"
        "    print(net(torch.ones(2, 4)).shape)\n"
        "assert not net.weight.isnan().any()\n"
        "net(torch.ones(6, 4)).sum().backward()\n",
        encoding="utf-8",
    )
    assert main(["plan", "--ranks", "2", "--verbose", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("torch.Size([2, 4])\nmesh dp=2")
    assert "optimizer state (assumed: two values for each element, as of Adam)" in out


def test_a_training_step_that_is_one_program_is_planned_with_its_optimizer(
    tmp_path, capsys
) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        "import torch, distcell as dc\n"
        "net = dc.nn.Dense(4, 4)\n"
        "model = dc.Model(net, torch.nn.MSELoss(), torch.optim.Adam(net.parameters()))\n"
        "model.train(1, [(torch.ones(6, 4), torch.ones(6, 4))])\n",
        encoding="utf-8",
    )
    assert main(["plan", "--ranks", "2", str(path)]) == 0
    out = capsys.readouterr().out
    assert "optimizer state (Adam)" in out
    assert "all_reduce  dp" in out


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("", "it called none"),
        ("torch.set_grad_enabled(False); net(torch.ones(2, 2))", "1 times, never with gradients"),
    ],
)
def test_a_script_that_never_trains_is_a_clear_error(tmp_path, capsys, call, found) -> None:
    path = tmp_path / "never.py"
    path.write_text(NEVER.format(call=call), encoding="utf-8")
    assert main(["plan", "--ranks", "2", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: `{path}` ended without a training call of a parallel network")
    assert found in err
    assert "= hint: " in err
    assert torch.is_grad_enabled()


def test_the_scripts_own_error_is_its_traceback_and_exit_code_1(tmp_path, capsys) -> None:
    path = tmp_path / "fails.py"
    path.write_text("def f():\n    raise KeyError('own')\nf()\n", encoding="utf-8")
    assert main(["plan", "--ranks", "2", str(path)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == f'  File "{path}", line 3, in <module>'
    assert lines[-1] == "KeyError: 'own'"


def test_the_scripts_own_exit_code_is_passed_on(tmp_path, capsys) -> None:
    path = tmp_path / "leaves.py"
    path.write_text("import sys\nsys.exit(7)\n", encoding="utf-8")
    assert main(["plan", "--ranks", "2", str(path)]) == 7
    path.write_text("import sys\nsys.exit('no data')\n", encoding="utf-8")
    assert main(["plan", "--ranks", "2", str(path)]) == 1
    assert capsys.readouterr().err == "no data\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "train.py"], "the following arguments are required: --ranks"),
        (["plan", "--ranks", "0", "train.py"], "`0` is not a number of at least 1"),
        (["plan", "--ranks", "2"], "the following arguments are required: script"),
        (["plan", "--ranks", "2", "/no/such.py"], "there is no script `/no/such.py`"),
        (["plot"], "invalid choice: 'plot'"),
        ([], "the following arguments are required"),
        (["check", "--ranks", "2", "--steps", "x", "train.py"], "`x` is not a number"),
        (["explain", "--ranks", "2"], "the following arguments are required: path, script"),
    ],
)
def test_a_wrong_command_line_is_one_error_and_exit_code_2(capsys, arguments, message) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err


def test_an_unknown_strategy_is_one_error(script, capsys) -> None:
    assert main(["plan", "--ranks", "2", "--strategy", "tensr", script, "8"]) == 2
    assert "did you mean `tensor`?" in capsys.readouterr().err


def test_the_process_is_afterwards_as_before(script, capsys) -> None:
    before = dict(os.environ), list(sys.path), list(sys.argv), torch.get_default_dtype()
    assert main(["plan", "--ranks", "2", script, "8"]) == 0
    capsys.readouterr()
    assert (dict(os.environ), list(sys.path), list(sys.argv), torch.get_default_dtype()) == before


def test_the_flags_are_these() -> None:
    common = ["--help", "--ranks", "--seed", "--strategy", "--verbose", "-h"]
    assert flags() == {
        "plan": sorted([*common, "--json", "--graph"]),
        "check": sorted([*common, "--steps"]),
        "explain": common,
    }


def test_layers_are_folded_where_their_numbers_are_every_combination() -> None:
    found = [(f"l.{i}.e.{j}.w", "a") for i in range(3) for j in (0, 2)]
    assert fold(found) == [("l.0-2.e.0,2.w", 6, "a")]
    assert fold(found[:-1]) == [(path, 1, "a") for path, _ in found[:-1]]


def test_a_table_without_rows_says_so_in_a_line() -> None:
    assert render([Table("reshards", ("a", "b"), ())]) == "reshards: none"
    assert [human(1023), human(1024), human(5 << 40)] == ["1023 B", "1.0 KiB", "5.0 TiB"]
    assert Spread(1, 1, 0).is_even


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_tables_are_drawn_and_elsewhere_they_are_plain() -> None:
    blocks = ["mesh dp=2", Table("sizes", ("name", ">bytes"), (("[32@tp, 8]", "12"),))]
    blocks.append(Table("notes", ("",), (("a note",),)))
    plain, drawn = io.StringIO(), Terminal()
    show(blocks, plain)
    show(blocks, drawn)
    assert plain.getvalue() == (
        "mesh dp=2\n\nsizes\n  name        bytes\n  [32@tp, 8]     12\n\nnotes\n  a note\n"
    )
    assert "[32@tp, 8] │    12" in drawn.getvalue()
    assert "mesh dp=2" in drawn.getvalue()


@pytest.mark.slow
def test_the_command_as_it_is_typed(script) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "distcell", "plan", "--ranks", "64", script, "64"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mesh dp=64     64 ranks     strategy strategies/data.yaml\n")


@pytest.mark.slow
def test_a_reader_that_stops_reading_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "distcell", "plan", "--ranks", "2", str(path), "4"]
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + 13, "")
