"""What a strategy file is told that knows no cell of a model: lines that parse, match and split."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import distcell as dc
from distcell.errors import StrategyError
from distcell.strategy import load_strategy
from distcell.testing import assert_one_meaning

HEAD = "distcell: 1\nmesh: {dp: -1, tp: 2}\ninputs: {'*': [dp]}\n"


class Chain(nn.Module):
    """Four layers one after the other, named so that nobody knows them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.b(torch.relu(self.a(x))))
        return self.d(torch.relu(self.c(x))).square().mean()


class Block(nn.Module):
    """A norm, two layers and a gate within a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.ln, self.value, self.door = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(8, 12)
        self.out = nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.body(x)
        y = self.ln(x)
        return x + self.out(functional.silu(self.door(y)) * self.value(y))


class Stack(nn.Module):
    """Blocks in a list, between a table and a head that no line should name."""

    def __init__(self) -> None:
        super().__init__()
        self.lookup, self.readout = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.LayerNorm(8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.lookup(ids)
        for layer in self.layers:
            x = layer(x)
        scores = self.readout(self.last(x))
        return functional.cross_entropy(scores.flatten(0, 1), ids.flatten())


class Heads(nn.Module):
    """Attention with names of its own, and a table that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.lookup, self.ln = nn.Embedding(12, 8), nn.LayerNorm(8)
        self.ask, self.key_of, self.tell, self.back = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.lookup(ids)
        parts = (f(self.ln(x)).unflatten(-1, (4, 2)).transpose(1, 2) for f in self.heads())
        q, k, v = parts
        mixed = functional.softmax(q @ k.transpose(-1, -2) / 2, -1) @ v
        x = x + self.back(mixed.transpose(1, 2).flatten(2))
        return (x @ self.lookup.weight.t()).logsumexp(-1).mean()

    def heads(self) -> list[nn.Module]:
        return [self.ask, self.key_of, self.tell]


class Pictures(nn.Module):
    """Convolutions with batch norms in a sequence, pooled, with a layer after."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.stage(x).square().mean()


class Encoder(nn.Module):
    """torch's own attention under another name, and weights that belong to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(8, 4, batch_first=True)
        self.inner = nn.ParameterDict(
            {"wide": nn.Parameter(torch.randn(8, 16)), "thin": nn.Parameter(torch.randn(16, 8))}
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x, x, x, need_weights=False)[0]
        return (x + torch.tanh(x @ self.inner["wide"]) @ self.inner["thin"]).square().mean()


class Single(nn.Module):
    """One layer, of which nothing follows."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.only(x).square().mean()


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


IDS = torch.arange(20).reshape(4, 5) % 11

MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, list[str]]] = {
    "chain": (
        Chain,
        rows(4, 8),
        [
            '"a": {params: {weight: [tp, _], bias: [tp]}}',
            '"b": {params: {weight: [_, tp], bias: [_]}}',
            '"c": {params: {weight: [tp, _], bias: [tp]}}',
            '"d": {params: {weight: [_, tp], bias: [_]}}',
        ],
    ),
    "stack": (
        Stack,
        IDS,
        [
            '"layers.*.body.1": {params: {weight: [tp, _], bias: [tp]}}',
            '"layers.*.body.3": {params: {weight: [_, tp], bias: [_]}}',
            '"layers.*.door": {params: {weight: [tp, _], bias: [tp]}}',
            '"layers.*.value": {params: {weight: [tp, _], bias: [tp]}}',
            '"layers.*.out": {params: {weight: [_, tp]}}',
        ],
    ),
    "heads": (
        Heads,
        IDS,
        [
            '"ask": {params: {weight: [tp, _], bias: [tp]}}',
            '"key_of": {params: {weight: [tp, _], bias: [tp]}}',
            '"tell": {params: {weight: [tp, _], bias: [tp]}}',
            '"back": {params: {weight: [_, tp], bias: [_]}}',
        ],
    ),
    "pictures": (
        Pictures,
        rows(4, 3, 6, 6),
        [
            '"stage.0": {params: {weight: [tp, _, _, _], bias: [tp]}}',
            '"stage.3": {params: {weight: [_, tp, _, _], bias: [_]}}',
        ],
    ),
    "encoder": (
        Encoder,
        rows(4, 5, 8),
        [
            '"mix": {params: {in_proj_weight: [tp, _], in_proj_bias: [tp]}}',
            '"mix.out_proj": {params: {weight: [_, tp], bias: [_]}}',
            '"inner": {params: {wide: [_, tp], thin: [tp, _]}}',
        ],
    ),
    "single": (Single, rows(4, 8), ['"only": {params: {weight: [tp, _], bias: [tp]}}']),
}


def proposal(build: Callable[[], nn.Module], x: Tensor) -> list[str]:
    """The lines that the error proposes."""
    unknown = HEAD + "cells:\n  zzz: {params: {weight: [tp]}, optional: true}\n"
    with pytest.raises(StrategyError, match="matches a cell of this model") as caught:
        dc.plan(build(), x, unknown, 4)
    lines = (caught.value.hint or "").splitlines()
    assert lines[1] == "cells:"
    return [line.strip() for line in lines[2:]]


@pytest.mark.parametrize(("build", "x", "wanted"), MODELS.values(), ids=MODELS)
def test_the_proposal_follows_what_the_model_does(build, x, wanted) -> None:
    assert proposal(build, x) == wanted


@pytest.mark.slow
@pytest.mark.parametrize(("build", "x", "wanted"), MODELS.values(), ids=MODELS)
def test_the_proposal_splits_the_model_and_means_the_same(build, x, wanted) -> None:
    text = HEAD + "\n".join(["cells:", *(f"  {line}" for line in proposal(build, x))])
    torch.manual_seed(0)
    net = build()
    planned = dc.plan(net, x, text, 4)
    split = [name for name, _ in net.named_parameters() if "tp" in planned.layout(name).axes]
    assert len([name for name in split if "bias" not in name]) >= len(wanted)
    assert_one_meaning(net.double(), x.double() if x.is_floating_point() else x, text, 4)


@pytest.mark.parametrize("name", ["tensor", "data-tensor", "sequence"])
def test_the_proposal_may_be_added_to_the_file_that_does_not_fit(name: str, tmp_path) -> None:
    with pytest.raises(StrategyError) as caught:
        dc.plan(Chain(), rows(4, 8), name, 4)
    lines = (caught.value.hint or "").partition("cells:\n")[2]
    path = tmp_path / "mine.yaml"
    path.write_text(_text_of(name).rstrip("\n") + "\n" + lines + "\n")
    planned = dc.plan(Chain(), rows(4, 8), str(path), 4)
    assert str(planned.layout("a.weight")) == "[8@tp, 8]"


def _text_of(name: str) -> str:
    source = load_strategy(name).source
    from distcell._resources import resource_dir

    return (resource_dir("strategies") / source.rpartition("/")[2]).read_text()


def test_a_model_without_products_is_told_so() -> None:
    with pytest.raises(StrategyError, match="matches a cell of this model") as caught:
        dc.plan(nn.Sequential(nn.LayerNorm(4)), rows(4, 4), "tensor", 2)
    assert "`data`" in (caught.value.hint or "")


def test_a_model_that_is_one_layer_is_named_in_the_proposal() -> None:
    with pytest.raises(StrategyError, match="no pattern of") as caught:
        dc.plan(nn.Linear(8, 8), torch.ones(4, 8), "tensor", ranks=2)
    assert "  the network itself" in caught.value.where
    assert not any(line.strip() == "" for line in caught.value.where)
