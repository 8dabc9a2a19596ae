"""MegEngine's Module: its verbs and arguments, beside torch's of the same name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from distcell import Parameter, nn
from tests.seeds.about import about


class Net(nn.Cell):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.conv, self.bn, self.fc = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dense(2, 3)
        self.scale = Parameter(torch.ones(1))

    def construct(self, x: Tensor) -> Tensor:
        return self.fc(self.bn(self.conv(x)).mean((2, 3))) * self.scale


PARAMS = ["scale", "conv.weight", "bn.weight", "bn.bias", "fc.weight", "fc.bias"]
BUFFERS = ["bn.running_mean", "bn.running_var", "bn.num_batches_tracked"]


@about("Module.name")
def test_a_module_has_the_name_that_it_was_given() -> None:
    assert Net().name is None
    assert Net(name="head").name == "head"
    assert nn.Cell("head").name == "head"


@about("Module.apply")
def test_apply_reaches_every_module_and_this_one() -> None:
    net, seen = Net(), []
    net.apply(seen.append)
    assert set(seen) == set(net.modules())


@about("Module.parameters", "Module.named_parameters")
def test_parameters_take_recurse_and_recursive() -> None:
    net = Net()
    assert [name for name, _ in net.named_parameters()] == PARAMS
    assert [name for name, _ in net.named_parameters(prefix=None, recursive=False)] == ["scale"]
    assert [name for name, _ in net.named_parameters("net", False)] == ["net.scale"]
    assert [p is net.scale for p in net.parameters(recursive=False)] == [True]
    assert len(list(net.parameters(recurse=True))) == len(PARAMS)
    seen = {id(net.scale)}
    assert [name for name, _ in net.named_parameters(seen=seen)] == PARAMS[1:]
    assert list(net.parameters(seen=seen)) == []
    parents = [entry[2] for entry in net.named_parameters("net", with_parent=True)]  # type: ignore[misc]
    assert parents == [net, net.conv, net.bn, net.bn, net.fc, net.fc]


@about("Module.buffers", "Module.named_buffers")
def test_buffers_are_the_tensors_that_are_no_parameters() -> None:
    net = Net()
    assert [name for name, _ in net.named_buffers(recursive=True)] == BUFFERS
    assert [name for name, _ in net.named_buffers(None, True)] == BUFFERS
    assert list(net.buffers(recursive=False)) == []
    assert len(list(net.buffers())) == 3


@about("Module.tensors", "Module.named_tensors")
def test_tensors_are_parameters_and_buffers() -> None:
    net = Net()
    assert [name for name, _ in net.named_tensors()] == PARAMS + BUFFERS
    assert [name for name, _ in net.named_tensors("net", recursive=False)] == ["net.scale"]
    assert len(list(net.tensors())) == 9
    assert [t is net.scale for t in net.tensors(recursive=False)] == [True]


@about("Module.named_children", "Module.named_modules")
def test_named_modules_takes_torchs_and_megengines_first_argument() -> None:
    net = Net()
    assert list(net.named_children()) == [("conv", net.conv), ("bn", net.bn), ("fc", net.fc)]
    assert next(iter(net.named_children(with_parent=True))) == ("conv", net.conv, net)
    paths = ["", "conv", "bn", "fc"]
    assert [name for name, _ in net.named_modules()] == paths
    assert [name for name, _ in net.named_modules(None, "net")][:2] == ["net", "net.conv"]
    assert [name for name, _ in net.named_modules("net")][:2] == ["net", "net.conv"]
    assert [name for name, _ in net.named_modules({net.conv})] == ["", "bn", "fc"]
    parents = [entry[2] for entry in net.named_modules("net", with_parent=True)]  # type: ignore[misc]
    assert parents == [None, net, net, net]


@about("Module.train")
def test_train_reaches_children_unless_recursive_is_false() -> None:
    net = Net()
    assert net.train(False, recursive=False) is net
    assert (net.training, net.bn.training) == (False, True)
    net.train(mode=False)
    assert not net.bn.training
    net.train()
    assert net.bn.training


@about("Module.register_forward_hook", "Module.register_forward_pre_hook")
def test_hooks_take_megengines_argument_and_return_a_handle() -> None:
    net, x = Net().eval(), torch.randn(2, 1, 4, 4)
    plain = net(x)
    first = net.register_forward_hook(lambda module, inputs, outputs: outputs + 1)
    assert torch.equal(net(x), plain + 1)
    first.remove()
    second = net.register_forward_pre_hook(lambda module, inputs: (torch.zeros_like(inputs[0]),))
    assert torch.equal(net(x), net(torch.zeros_like(x)))
    second.remove()
    assert torch.equal(net(x), plain)


@about("example.load_state_dict", "Module.load_state_dict")
def test_a_state_may_be_a_function_that_skips_reshapes_and_initialises() -> None:
    net = Net()
    state = {
        key: np.full(tensor.shape, 2.0, np.float32) for key, tensor in Net().state_dict().items()
    }
    before = net.fc.weight.detach().clone()
    skipped = {key: None if key.startswith("fc") else value for key, value in state.items()}
    net.load_state_dict(skipped, strict=False)
    assert torch.equal(net.fc.weight, before)
    assert net.conv.weight.unique().tolist() == [2.0]

    net.load_state_dict(lambda key, tensor: (state[key] * 2).ravel().reshape(tensor.shape))
    assert net.fc.weight.unique().tolist() == [4.0]

    def initialise_and_prune(key: str, tensor: Tensor) -> Any:
        if "bias" in key:
            torch.nn.init.zeros_(tensor)
        if "conv" in key:
            return tensor.numpy() * 0
        return None

    net.load_state_dict(initialise_and_prune, strict=False)
    assert not net.conv.weight.any()
    assert not net.fc.bias.any()
    assert net.fc.weight.unique().tolist() == [4.0]


@about("Module.load_state_dict")
def test_a_state_that_does_not_fit_is_an_error() -> None:
    net = Net()
    with pytest.raises(KeyError, match="9 of the state's keys were left out"):
        net.load_state_dict(lambda key, tensor: None)
    with pytest.raises(RuntimeError, match=r"size mismatch for fc\.bias"):
        net.load_state_dict(lambda key, tensor: np.zeros(9) if key == "fc.bias" else tensor)
    with pytest.raises(TypeError, match="the value of `scale` is a str"):
        net.load_state_dict({"scale": "one"}, strict=False)
    with pytest.raises(TypeError, match="`state_dict` is a int"):
        net.load_state_dict(3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="Missing key"):
        net.load_state_dict({"scale": torch.ones(1)})
    assert net.load_state_dict(Net().state_dict()).missing_keys == []


@about("Module.replace_param")
def test_replace_param_takes_parameters_by_position() -> None:
    net = Net()
    new = Parameter(torch.full((2, 1, 3, 3), 7.0))
    assert net.replace_param({4: new}, start_pos=3) == 6
    assert net.conv.weight is new
    assert new.name == "conv.weight"
    with pytest.raises(ValueError, match=r"`scale` cannot be replaced: \[1\] by \[2\]"):
        net.replace_param([Parameter(torch.ones(2))], 0)
    with pytest.raises(TypeError, match="what replaces `scale` is a Tensor"):
        net.replace_param({0: torch.ones(1)}, 0)  # type: ignore[dict-item]
    net.fc.weight = net.scale
    fresh = Parameter(torch.zeros(1))
    net.replace_param({0: fresh}, 0)
    assert net.fc.weight is fresh
