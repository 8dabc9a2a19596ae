"""`python -m distcell explain`: why a layout is as it is, back to the line that says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from distcell.__main__ import main

STRATEGY = """\
distcell: 1
mesh: {dp: 2, tp: 2}
inputs: {"*": [dp]}
cells:
  "**.up": {params: {weight: [tp, _]}}
"""

SCRIPT = """
import torch
import distcell as dc

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up = torch.nn.Embedding(10, 8), torch.nn.Linear(8, 16)
        self.down, self.head = torch.nn.Linear(16, 8), torch.nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.down(torch.relu(self.up(self.embed(ids)))))

net = dc.parallelize(Net())
net(torch.randint(10, (4, 3))).logsumexp(-1).sum().backward()
"""


@pytest.fixture
def explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "mine.yaml").write_text(STRATEGY, encoding="utf-8")
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")

    def run(path: str) -> tuple[int, list[str], str]:
        files = [str(tmp_path / name) for name in ("mine.yaml", "train.py")]
        code = main(["explain", path, "--ranks", "4", "--strategy", files[0], files[1]])
        out, err = capsys.readouterr()
        place = str(tmp_path) + "/"
        return code, out.replace(place, "").splitlines(), err.replace(place, "")

    return run


def test_an_annotated_parameter_names_its_line_and_column(explain) -> None:
    code, lines, _ = explain("up.weight")
    assert code == 0
    assert lines == [
        "mesh dp=2 tp=2",
        "",
        "param `up.weight`  f32[16@tp, 8]",
        "  dim 0 is split over tp:",
        "    %up_weight: annotated at mine.yaml:5:30",
        "  every rank along dp holds the same: nothing splits it over them",
    ]


def test_a_parameter_that_nobody_annotated_tells_along_which_ops_its_axis_came(explain) -> None:
    _, lines, _ = explain("down.weight")
    assert lines[2] == "param `down.weight`  f32[8, 16@tp]"
    chain = [line.strip() for line in lines[4:-1]]
    assert lines[3] == "  dim 1 is split over tp:"
    assert chain[-1] == "%up_weight: annotated at mine.yaml:5:30"
    assert any("aten.relu.default in the net (train.py:13)" in line for line in chain)
    assert any("aten.addmm.default in up (train.py:13)" in line for line in chain)


def test_a_cell_shows_what_crosses_its_border_and_its_parameters(explain) -> None:
    _, lines, _ = explain("up")
    heads = [line for line in lines if "`" in line and not line.startswith(" ")]
    assert heads == [
        "input 0 of `up`  f32[4@dp, 3, 8]",
        "output 0 of `up`  f32[4@dp, 3, 16@tp]",
        "param `up.weight`  f32[16@tp, 8]",
        "param `up.bias`  f32[16@tp]",
    ]
    assert "    %ids: annotated at mine.yaml:3:15" in lines


def test_a_tied_parameter_is_found_under_both_names(explain) -> None:
    _, lines, _ = explain("head.weight")
    assert lines[1] == "`head.weight` is the same tensor as `embed.weight`"
    assert lines[3].startswith("param `embed.weight`")


def test_an_input_may_be_asked_for(explain) -> None:
    _, lines, _ = explain("ids")
    assert lines[2] == "input `ids`  i64[4@dp, 3]"


def test_an_unknown_path_is_one_error_with_the_nearest_name(explain) -> None:
    code, lines, err = explain("up.wieght")
    assert code == 2
    assert not lines
    assert err.startswith("error: there is no parameter, input or cell `up.wieght` in the plan")
    assert "did you mean `up.weight`?" in err
