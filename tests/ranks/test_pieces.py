"""What a rank may do with a parameter of which it holds a piece."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import distributed as dist

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


def _l2(net):
    return sum(p.pow(2).sum() for p in net.parameters())


USES = {
    "norm": lambda net: net.up.weight.norm(),
    "penalty": _l2,
    "product": lambda net: torch.ones(3, 8) @ net.up.weight.t(),
    "a part of the network": lambda net: net.up(torch.ones(3, 8)),
    "indexing": lambda net: net.up.weight[0],
    "filling at random": lambda net: torch.nn.init.normal_(net.up.weight),
    "norm of the gradient": lambda net: net.up.weight.grad.norm(),
    "norm by linalg": lambda net: torch.linalg.vector_norm(net.up.weight.grad),
    "norms of a list": lambda net: torch._foreach_norm([p.grad for p in net.parameters()]),
    "mean of the data": lambda net: net.up.weight.data.mean(),
    "mean of what is made of it": lambda net: (net.up.weight.detach() * 2).abs().mean(),
    "any": lambda net: net.up.weight.grad.isnan().any(),
    "equality": lambda net: torch.equal(net.up.weight, net.up.weight),
    "one vector": lambda net: torch.nn.utils.parameters_to_vector(net.parameters()),
    "from one vector": lambda net: torch.nn.utils.vector_to_parameters(
        torch.zeros(1000), net.parameters()
    ),
    "numpy": lambda net: net.up.weight.detach().cpu().numpy(),
    "saving": lambda net: pickle.dumps(net.up.weight.data),
    "sorting": lambda net: net.up.weight.data.flatten().sort(),
    "noise": lambda net: net.up.weight.data.add_(torch.randn_like(net.up.weight)),
    "an outer product": lambda net: net.up.weight.data.addr_(torch.ones(8), torch.ones(8)),
    "differences": lambda net: torch.diff(net.up.weight, dim=0, prepend=torch.zeros(1, 8)),
    "dropout": lambda net: torch.native_dropout(net.up.weight, 0.5, train=True),
    "a loss": lambda net: torch.nn.functional.mse_loss(net.up.weight, net.up.weight * 2),
    "a hook's norm": lambda net: _backward_with_hook(net, lambda grad: grad / grad.norm()),
}


def _backward_with_hook(net, hook) -> None:
    net.up.weight.register_hook(hook)
    net(torch.ones(4, 8)).mean().backward()


def test_a_hook_from_before_the_first_call_gets_a_piece_that_says_so(net) -> None:
    net.up.weight.register_hook(lambda grad: grad / grad.norm())
    with pytest.raises(LayoutError, match=r"`norm` of `up\.weight`, of which"):
        net(torch.ones(4, 8)).mean().backward()


EXCHANGES = {
    "all_reduce": lambda p: dist.all_reduce(p.grad),
    "broadcast": lambda p: dist.broadcast(p.data, 0),
    "all_gather": lambda p: dist.all_gather([torch.empty(p.shape)], p.grad),
    "of a list": lambda p: dist.all_gather([p.grad], torch.empty(p.shape)),
}


@pytest.fixture
def group() -> Iterator[None]:
    """The process group of a script that exchanges gradients by itself."""
    import distcell.runtime.mpi  # noqa: F401 (registers the backend)

    dist.init_process_group("mpi4py")
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)
def test_an_exchange_of_pieces_by_the_users_own_collective_is_refused(net, exchange) -> None:
    net(torch.ones(4, 8)).mean().backward()
    with pytest.raises(LayoutError, match=r"`torch\.distributed` of `up\.weight`") as caught:
        exchange(net.up.weight)
    assert "leave the exchange out" in (caught.value.hint or "")


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_what_needs_the_whole_is_refused_outside_of_the_network(net, use) -> None:
    net(torch.ones(4, 8)).mean().backward()
    with pytest.raises(LayoutError, match="holds a piece") as caught:
        use(net)
    assert "`dc.whole_tensor(parameter)` is the whole" in (caught.value.hint or "")


WHOLES = {
    "copying": lambda net, whole: net.up.weight.data.copy_(whole),
    "a mask": lambda net, whole: net.up.weight.data.mul_(whole),
    "assigning": lambda net, whole: setattr(net.up.weight, "data", whole),
    "a gradient": lambda net, whole: setattr(net.up.weight, "grad", whole),
    "averaging": lambda net, whole: whole.lerp_(net.up.weight.detach(), 0.1),
}


@pytest.mark.parametrize("use", WHOLES.values(), ids=WHOLES)
def test_a_whole_value_is_refused_on_a_piece(net, use) -> None:
    net(torch.ones(4, 8))
    with pytest.raises(LayoutError, match=r"tensor of shape \[16, 8\]") as caught:
        use(net, torch.ones(16, 8))
    assert "load_state_dict" in (caught.value.hint or "")
    assert "[16@tp, 8]" in caught.value.where[0]


def test_what_looks_at_single_elements_works(net) -> None:
    before = None
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(2):
        net(torch.ones(4, 8)).mean().backward()
        dc.clip_grad_norm_(net, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        before = dc.whole_tensor(net.up.weight).clone()
    with torch.no_grad():
        net.up.weight.mul_(2).add_(1)
    assert torch.equal(dc.whole_tensor(net.up.weight), before * 2 + 1)


def _clip_by_value(net) -> None:
    torch.nn.utils.clip_grad_value_(net.parameters(), 0.01)


def _clip_weights(net) -> None:
    with torch.no_grad():
        for p in net.parameters():
            p.data.clamp_(-0.2, 0.2)


def _sgd_by_hand(net) -> None:
    for p in net.parameters():
        p.data -= 0.1 * p.grad


def _clip_by_norm(net) -> None:
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)


def _clip_by_a_norm_asked_for(net) -> None:
    total = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])
    torch.nn.utils.clip_grads_with_norm_(net.parameters(), 0.1, total)


def _double_precision(net) -> None:
    net.double()
    assert net.up.weight.grad.dtype == torch.float64
    net.float()


def _penalty(net) -> None:
    wholes = [dc.whole_tensor(p) for p in net.parameters()]
    sum(whole.pow(2).sum() + whole.norm() for whole in wholes).backward()


def _gradient_by_function(net) -> None:
    loss = net(torch.ones(4, 8)).square().mean()
    grads = torch.autograd.grad(loss, list(net.parameters()))
    for p, grad in zip(net.parameters(), grads, strict=True):
        p.grad.add_(grad)


HANDIWORK = [
    _clip_by_value,
    _clip_weights,
    _sgd_by_hand,
    _clip_by_norm,
    _clip_by_a_norm_asked_for,
    _double_precision,
    _penalty,
    _gradient_by_function,
]


def trained(net, work, *, optimizer=None, average=False):
    """Weights and averages of weights after some steps in which a user does something by hand."""
    optimizer = optimizer or torch.optim.AdamW(net.parameters(), lr=0.1)
    shadow = None
    for step in range(3):
        x = torch.linspace(-1, 1, 32).reshape(4, 8) + step
        net(x).square().mean().backward()
        work(net)
        optimizer.step()
        optimizer.zero_grad()
        if average and shadow is None:
            shadow = copy.deepcopy(net)
            swa = torch.optim.swa_utils.AveragedModel(
                net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
            )
            by_hand = {n: p.detach().clone() for n, p in net.named_parameters()}
        elif average:
            swa.update_parameters(net)
            with torch.no_grad():
                for name, p in net.named_parameters():
                    by_hand[name].mul_(0.9).add_(p, alpha=0.1)
                    shadow.get_parameter(name).lerp_(p, 0.1)
    found = {name: dc.whole_tensor(p).detach().clone() for name, p in net.named_parameters()}
    if average:
        for name in list(found):
            found[f"shadow {name}"] = shadow.state_dict()[name]
            found[f"swa {name}"] = dc.whole_tensor(swa.module.get_parameter(name)).detach()
            found[f"hand {name}"] = dc.whole_tensor(by_hand[name])
    return found


def alone(net):
    """The same network on one device."""
    other = torch.nn.Sequential()
    other.up, other.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
    other.load_state_dict(net.state_dict())
    return other


def assert_alike(found, wanted) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("work", HANDIWORK)
def test_what_a_user_does_by_hand_is_what_one_device_does(net, work) -> None:
    wanted = trained(alone(net), work)
    assert_alike(trained(net, work), wanted)


@pytest.mark.parametrize("fused", [None, True])
def test_averages_of_weights_are_those_of_one_device(net, fused) -> None:
    nothing, other = (lambda net: None), alone(net)
    wanted = trained(
        other, nothing, optimizer=torch.optim.Adam(other.parameters(), fused=fused), average=True
    )
    optimizer = torch.optim.Adam(net.parameters(), fused=fused)
    assert_alike(trained(net, nothing, optimizer=optimizer, average=True), wanted)
    # torch's own code has seen plain tensors, and has made its state of such
    kinds = {type(item) for state in optimizer.state.values() for item in state.values()}
    assert kinds == {torch.Tensor}


def _by_hand(average, net) -> None:
    for mine, p in zip(average.parameters(), net.parameters(), strict=True):
        mine.data.lerp_(p.data, 0.1)


def _all_at_once(average, net) -> None:
    theirs = [p.detach() for p in net.parameters()]
    torch._foreach_lerp_([p.detach() for p in average.parameters()], theirs, 0.1)


@pytest.mark.parametrize("update", [_by_hand, _all_at_once])
def test_an_average_that_was_made_before_the_first_call_says_to_make_it_after(net, update) -> None:
    average = copy.deepcopy(net)
    net(torch.ones(4, 8))
    with pytest.raises(LayoutError, match=r"tensor of shape \[16, 8\]") as caught:
        update(average, net)
    assert "are to be\nmade after its first call" in (caught.value.hint or "")


def test_a_closure_is_the_users_code(net) -> None:
    net(torch.ones(4, 8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def closure():
        net(torch.ones(4, 8)).mean().backward()
        return net.up.weight.grad.norm()

    with pytest.raises(LayoutError, match="holds a piece"):
        optimizer.step(closure)


def test_a_piece_in_another_shape_has_no_whole(net) -> None:
    net(torch.ones(4, 8))
    with pytest.raises(LayoutError, match="was reshaped has no whole"):
        dc.whole_tensor(net.up.weight.detach().view(-1))


def test_a_piece_says_what_it_is(net) -> None:
    net(torch.ones(4, 8)).mean().backward()
    assert repr(net.up.weight.grad).startswith("piece of `up.weight`, [16@tp, 8]: tensor(")
    assert dc.layout(net.up.weight.grad) == dc.layout(net.up.weight)
    assert dc.whole_tensor(net.up.weight.grad).shape == (16, 8)
    assert net.up.weight.grad is net.up.weight.grad


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("fused", [None, True])
def test_a_gradient_that_overflows_on_one_rank_skips_the_step_on_all(net, kind, fused) -> None:
    net(torch.ones(4, 8)).mean().backward()
    optimizer = kind(net.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(net(torch.ones(4, 8)).mean()).backward()
    if world.init().rank == 0:
        dc.local_state_dict(net)  # the pieces are this rank's own
        net.up.weight.grad.fill_(float("inf"))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])


def test_the_whole_of_a_piece_is_the_same_on_all_ranks(net) -> None:
    whole = net.up.weight.detach().clone()
    net(torch.ones(4, 8))
    assert net.up.weight.shape != whole.shape
    assert torch.equal(dc.whole_tensor(net.up.weight), whole)
    assert torch.equal(net.state_dict()["up.weight"], whole)
    assert torch.equal(net.up.state_dict()["weight"], whole)


def test_a_state_dict_holds_copies_of_whole_values_split_or_not(net) -> None:
    net.register_buffer("mean", torch.zeros(3))
    net(torch.ones(4, 8))
    saved = net.state_dict()
    before = {name: value.clone() for name, value in saved.items()}
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            tensor.add_(1)
    assert saved.keys() == before.keys() == {*dict(net.named_parameters()), "mean"}
    for name, value in saved.items():
        assert torch.equal(value, before[name])
        with pytest.raises(LayoutError, match="writes into a copy") as caught:
            value.mul_(0)
        assert "load_state_dict" in (caught.value.hint or "")
    net.load_state_dict(saved)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])


def test_what_is_saved_of_a_state_dict_are_plain_tensors(net) -> None:
    net(torch.ones(4, 8))
    saved = net.state_dict()
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    for kept in (loaded, copy.deepcopy(saved), pickle.loads(pickle.dumps(dict(saved)))):
        assert {type(value) for value in kept.values()} == {torch.Tensor}
        kept["up.bias"].mul_(2)
        assert torch.equal(kept["up.bias"], saved["up.bias"] * 2)


def test_a_state_dict_of_the_parameters_themselves_is_refused(net) -> None:
    net(torch.ones(4, 8))
    with pytest.raises(LayoutError, match=r"keep_vars=True.* of `up.weight`") as caught:
        net.state_dict(keep_vars=True)
    assert "leave `keep_vars` out" in (caught.value.hint or "")
    with pytest.raises(LayoutError, match=r"assign=True.* in place of `up.weight`") as caught:
        net.load_state_dict(net.state_dict(), assign=True)
    assert "leave `assign` out" in (caught.value.hint or "")


def test_a_state_of_another_shape_is_refused(net) -> None:
    net(torch.ones(4, 8))
    with pytest.raises(LayoutError, match=r"the state has `up.weight` as \[3, 8\]"):
        net.load_state_dict({**net.state_dict(), "up.weight": torch.ones(3, 8)})


def test_pieces_as_plain_tensors_are_live(net) -> None:
    net(torch.ones(4, 8))
    pieces = dc.local_state_dict(net)
    assert {type(piece) for piece in pieces.values()} == {torch.Tensor}
    pieces["up.weight"].zero_()
    assert not net.state_dict()["up.weight"].any()


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


class Holder(torch.nn.Module):
    def __init__(self, up: torch.nn.Module) -> None:
        super().__init__()
        self.up = up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)


def test_a_copy_that_is_an_average_of_a_network_is_called_like_it(net) -> None:
    torch.manual_seed(0)
    alone = torch.nn.Sequential()
    alone.up, alone.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def averaged(model):
        optimizer, average = torch.optim.SGD(model.parameters(), lr=0.1), None
        for x in torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1)):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            average = average or copy.deepcopy(model)
            with torch.no_grad():
                for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                    kept.lerp_(new, 0.5)
        return average

    found, wanted = averaged(net), averaged(alone)
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    torch.testing.assert_close(found(x), wanted(x))
    torch.testing.assert_close(dict(found.state_dict()), dict(wanted.state_dict()))


def test_two_networks_that_share_a_cell_train_it_together(net) -> None:
    torch.manual_seed(0)
    alone = torch.nn.Linear(8, 16)
    first, second = (dc.parallelize(Holder(net.up)) for _ in range(2))
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    for held in (first, second):
        held(x).square().mean().backward()
    for _ in range(2):
        alone(x).square().mean().backward()
    assert first.up.weight is second.up.weight
    torch.testing.assert_close(dc.whole_tensor(first.up.weight.grad), alone.weight.grad)
