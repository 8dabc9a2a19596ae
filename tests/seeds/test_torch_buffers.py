"""The page that compares torch's `buffers` with MindSpore's `untrainable_params`."""

from __future__ import annotations

from types import GeneratorType
from typing import Any

import pytest
import torch

from distcell import nn
from tests.seeds.about import about


class ConvBN(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 3)
        self.bn = nn.BatchNorm2d(64)

    def construct(self, x: Any) -> Any:
        x = self.conv(x)
        return self.bn(x)


class MyNet(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.build_block = nn.SequentialCell(ConvBN(), nn.ReLU())

    def construct(self, x: Any) -> Any:
        return self.build_block(x)


@about("example.untrainable_params", "Cell.untrainable_params")
def test_untrainable_params_are_the_moving_statistics_under_mindspores_names() -> None:
    net = MyNet()
    found = net.untrainable_params()
    assert type(found) is list
    assert [param.name for param in found] == [
        "build_block.0.bn.moving_mean",
        "build_block.0.bn.moving_variance",
    ]
    assert [str(param) for param in found] == [
        f"Parameter (name=build_block.0.bn.{name}, shape=(64,), dtype=Float32, requires_grad=False)"
        for name in ("moving_mean", "moving_variance")
    ]
    net(torch.randn(2, 3, 4, 4))
    assert torch.equal(found[0], net.build_block[0].bn.running_mean)
    assert net.untrainable_params(recurse=False) == []


@about("Cell.trainable_params")
def test_trainable_and_untrainable_are_all_parameters() -> None:
    net = MyNet()
    net.build_block[0].conv.weight.requires_grad_(False)
    net.register_buffer("mask", torch.ones(2, dtype=torch.bool))
    names = {param.name for param in net.get_parameters()}
    trainable = {param.name for param in net.trainable_params()}
    untrainable = {param.name for param in net.untrainable_params()}
    assert trainable == {"build_block.0.bn.weight", "build_block.0.bn.bias"}
    assert untrainable == names - trainable
    assert {"mask", "build_block.0.conv.weight"} <= untrainable
    assert net.trainable_params(recurse=False) == []
    with pytest.raises(TypeError, match="`recurse` is 1"):
        net.trainable_params(1)  # type: ignore[arg-type]


@about("example.buffers", "torch.buffers", "torch.named_buffers")
def test_torchs_buffers_keep_torchs_names() -> None:
    net = MyNet()
    assert type(net.buffers()) is GeneratorType
    assert [(name, buffer.size()) for name, buffer in net.named_buffers()] == [
        ("build_block.0.bn.running_mean", torch.Size([64])),
        ("build_block.0.bn.running_var", torch.Size([64])),
        ("build_block.0.bn.num_batches_tracked", torch.Size([])),
    ]
    assert list(net.buffers(recurse=False)) == []
