"""What a rank may do with a parameter of which it holds a piece."""

from __future__ import annotations

import copy

import pytest
import torch

import distcell as dc
from distcell.context import LaunchOptions, set_launch
from distcell.errors import LayoutError
from distcell.runtime import world

TENSOR = "tensor"


@pytest.fixture
def net() -> torch.nn.Module:
    here = world.init()
    if here.size == 1:
        pytest.skip("one rank holds everything")
    set_launch(LaunchOptions(mode="ranks", ranks=here.size, strategy=TENSOR))
    torch.manual_seed(0)
    net = torch.nn.Sequential()
    net.up, net.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
    dc.parallelize(net)
    yield net
    set_launch(LaunchOptions())


USES = {
    "norm": lambda net: net.up.weight.norm(),
    "sum of squares": lambda net: net.up.weight.square().sum() + net.up.weight.sum(),
    "product": lambda net: torch.ones(3, 8) @ net.up.weight.t() + net.up.weight.mean(),
    "a part of the network": lambda net: net.up(torch.ones(3, 8)),
    "indexing": lambda net: net.up.weight[0],
    "filling at random": lambda net: torch.nn.init.normal_(net.up.weight),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_what_needs_the_whole_is_refused_outside_of_the_network(net, use) -> None:
    net(torch.ones(4, 8)).mean().backward()
    with pytest.raises(LayoutError, match="holds a piece"):
        use(net)


def test_what_looks_at_single_elements_works(net) -> None:
    before = None
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(2):
        net(torch.ones(4, 8)).mean().backward()
        dc.clip_grad_norm_(net, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        before = net.up.weight.detach().clone()
    with torch.no_grad():
        net.up.weight.mul_(2).add_(1)
    assert torch.equal(net.up.weight.detach(), before * 2 + 1)


def test_the_whole_of_a_piece_is_the_same_on_all_ranks(net) -> None:
    whole = net.up.weight.detach().clone()
    net(torch.ones(4, 8))
    assert net.up.weight.shape != whole.shape
    assert torch.equal(dc.whole_tensor(net.up.weight), whole)
    assert torch.equal(net.state_dict()["up.weight"], whole)
    assert torch.equal(net.up.state_dict()["weight"], whole)


def test_an_optimizer_saves_whole_state_and_resumes_from_it(net) -> None:
    def train(net, optimizer, steps):
        losses = []
        for step in range(steps):
            x = torch.linspace(-1, 1, 32).reshape(4, 8) + step
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    train(net, optimizer, 2)
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    saved = copy.deepcopy(optimizer.state_dict())  # as torch.save does: parts of it are live
    assert saved["state"][0]["exp_avg"].shape == (16, 8)
    wanted = train(net, optimizer, 2)
    again = torch.optim.AdamW(net.parameters(), lr=0.1)
    net.load_state_dict(weights)
    again.load_state_dict(saved)
    assert again.state[net.up.weight]["exp_avg"].shape == net.up.weight.shape
    assert train(net, again, 2) == pytest.approx(wanted, abs=1e-7)
