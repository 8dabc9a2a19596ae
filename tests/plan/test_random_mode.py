"""torch's random operations under the mode: what they give, in eager mode and captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from distcell.errors import CaptureError
from distcell.random import keep_mask, random_mode, stream_of, uniform
from distcell.random.replacements import REPLACEMENTS
from distcell.scope import track

KEY, OTHER = torch.tensor([5, 0, 0]), torch.tensor([5, 1, 0])


@pytest.fixture(autouse=True)
def torch_draws_nothing() -> Iterator[None]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield


def draw(function: Callable[..., Any], *args: Any, key: Tensor = KEY) -> Any:
    """What a function gives under the mode; torch's own generator must not be used."""
    before = torch.get_rng_state()
    with random_mode(key):
        result = function(*args)
    assert torch.equal(torch.get_rng_state(), before)
    return result


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
        return self.drop(self.out(mixed.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + F.dropout(self.mlp(x), 0.4, self.training)


def losses_and_gradients(
    function: Callable[..., Tensor], key: Tensor, *inputs: Tensor
) -> tuple[Tensor, ...]:
    with random_mode(key):
        loss = function(*inputs).square().sum()
        return loss, *torch.autograd.grad(loss, inputs)


def model_step(model: nn.Module, key: Tensor, x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
    named = dict(zip((name for name, _ in model.named_parameters()), parameters, strict=True))
    with track(model), random_mode(key):
        loss = torch.func.functional_call(model, named, x).square().sum()
        return loss, *torch.autograd.grad(loss, parameters)


def captured(function: Callable[..., Any], *inputs: Tensor) -> torch.fx.GraphModule:
    """A function as a graph without in-place ops, as capture makes it."""
    traced = make_fx(function, tracing_mode="fake")(*inputs)
    return make_fx(torch.func.functionalize(traced, remove="mutations"))(*inputs)


def targets(graph: torch.fx.GraphModule) -> list[Any]:
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout in place": lambda x: F.dropout(x * 2, 0.4, inplace=True),
    "dropout of channels": lambda x: F.dropout2d(x, 0.4),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "native dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "nn.Dropout": nn.Dropout(0.4),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.4),
    "causal attention": lambda x: F.scaled_dot_product_attention(
        x, x, x, dropout_p=0.4, is_causal=True
    ),
    "gumbel": F.gumbel_softmax,
    "noise": lambda x: x + torch.randn_like(x) * torch.rand(6),
    "checkpoint": lambda x: checkpoint(F.dropout, x, 0.4, use_reentrant=False),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.slow
def test_a_captured_function_gives_bitwise_what_it_gives_in_eager_mode(name: str) -> None:
    x = torch.randn(2, 3, 4, 6, requires_grad=True)

    def step(key: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return losses_and_gradients(FUNCTIONS[name], key, x)

    graph = captured(step, KEY, x)
    assert not any(torch.Tag.nondeterministic_seeded in op.tags for op in targets(graph))
    for key in (KEY, OTHER):
        expected = draw(losses_and_gradients, FUNCTIONS[name], key, x)
        assert all(map(torch.equal, graph(key, x), expected))
    assert not torch.equal(graph(KEY, x)[1], graph(OTHER, x)[1])


@pytest.mark.slow
def test_a_captured_model_gives_bitwise_what_it_gives_in_eager_mode() -> None:
    model, x = nn.Sequential(Block(), Block()), torch.randn(2, 5, 8)
    inputs = (x, *model.parameters())
    graph = captured(partial(model_step, model), KEY, *inputs)
    masks = [op for op in targets(graph) if op is torch.ops.distcell.keep_mask.default]
    assert len(masks) == 8
    for key in (KEY, OTHER):
        assert all(map(torch.equal, graph(key, *inputs), model_step(model, key, *inputs)))


def test_a_draw_is_one_node() -> None:
    graph = captured(draw_in_trace, KEY, torch.zeros(3))
    assert targets(graph) == [torch.ops.distcell.uniform.default, torch.ops.aten.add.Tensor]


def draw_in_trace(key: Tensor, x: Tensor) -> Tensor:
    with random_mode(key):
        return x + torch.rand(3)


def test_dropout_keeps_what_the_mask_of_its_stream_says() -> None:
    x = torch.randn(4, 5, requires_grad=True)
    y = draw(F.dropout, x, 0.25)
    y.sum().backward()
    mask = keep_mask(KEY, stream_of("", 0), 0.75, [4, 5])
    assert torch.equal(x.grad, mask / 0.75)
    assert torch.equal(y, x * (mask / 0.75))


def test_native_dropout_gives_output_and_mask() -> None:
    x = torch.randn(4, 5, requires_grad=True)
    y, mask = draw(torch.native_dropout, x, 0.25, True)
    y.sum().backward()
    assert torch.equal(mask, keep_mask(KEY, stream_of("", 0), 0.75, [4, 5]))
    torch.testing.assert_close(x.grad, mask / 0.75)
    y, mask = draw(torch.native_dropout, x, 0.25, False)
    assert torch.equal(y, x)
    assert mask.all()
    assert not draw(torch.native_dropout, x, 1.0, True)[0].any()


def test_memory_format_does_not_change_the_mask() -> None:
    x = torch.ones(2, 3, 4, 5)
    expected = draw(F.dropout, x, 0.5)
    assert torch.equal(draw(F.dropout, x.to(memory_format=torch.channels_last), 0.5), expected)
    assert torch.equal(
        draw(lambda: F.dropout(torch.ones(3, 2, 4, 5).transpose(0, 1), 0.5)), expected
    )


def test_the_draws_of_a_cell_do_not_depend_on_those_of_another() -> None:
    class Pair(nn.Module):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.first, self.second = nn.Dropout(p), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.ones_like(self.first(x)))

    results = []
    for p in (0.0, 0.5):
        pair = Pair(p)
        with track(pair), random_mode(KEY):
            results.append(pair(torch.ones(100)))
    assert torch.equal(*results)
    assert torch.equal(results[0] != 0, keep_mask(KEY, stream_of("second", 0), 0.5, [100]))


def test_each_draw_of_a_cell_has_its_own_stream() -> None:
    first, second = draw(lambda: (torch.rand(9), torch.rand(9)))
    assert torch.equal(first, uniform(KEY, stream_of("", 0), [9]))
    assert torch.equal(second, uniform(KEY, stream_of("", 1), [9]))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_checkpointed_cells_draw_again_what_they_drew(reentrant: bool, inside: bool) -> None:
    class Saving(nn.Module):
        def __init__(self, net: nn.Module, save: bool) -> None:
            super().__init__()
            self.net, self.save = net, save

        def forward(self, x: Tensor) -> Tensor:
            x = F.dropout(x, 0.1)
            for layer in self.net:
                x = checkpoint(layer, x, use_reentrant=reentrant) if self.save else layer(x)
            return F.dropout(x, 0.1)

    net = nn.Sequential(Block(), Block())
    gradients = []
    for save in (False, True):
        model, x = Saving(net, save), torch.ones(2, 5, 8, requires_grad=True)
        model.zero_grad()
        before = torch.get_rng_state()
        with track(model), random_mode(KEY):
            loss = model(x).square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        assert torch.equal(torch.get_rng_state(), before)
        gradients.append([x.grad, *(p.grad for p in net.parameters())])
    assert all(map(torch.equal, *gradients))


def test_torch_checkpoints_as_before_outside_of_the_mode() -> None:
    x = torch.ones(50, requires_grad=True)
    with random_mode(KEY):
        pass
    y = checkpoint(F.dropout, x, 0.5, use_reentrant=False)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


N = 40_000
MOMENTS: dict[str, tuple[Callable[[], Tensor], float, float]] = {
    "rand": (lambda: torch.rand(N), 0.5, 12**-0.5),
    "rand f64": (lambda: torch.rand(N, dtype=torch.float64), 0.5, 12**-0.5),
    "rand bf16": (lambda: torch.rand(N, dtype=torch.bfloat16).float(), 0.498, 12**-0.5),
    "rand_like": (lambda: torch.rand_like(torch.empty(N)), 0.5, 12**-0.5),
    "randn": (lambda: torch.randn(N), 0, 1),
    "randn f16": (lambda: torch.randn(N, dtype=torch.float16).float(), 0, 1),
    "randn_like": (lambda: torch.randn_like(torch.empty(N)), 0, 1),
    "uniform_": (lambda: torch.empty(N).uniform_(-3, 5), 1, 8 * 12**-0.5),
    "normal_": (lambda: torch.empty(N).normal_(3, 2), 3, 2),
    "normal": (lambda: torch.normal(1.0, 2.0, (N,)), 1, 2),
    "normal of means": (lambda: torch.normal(torch.full((N,), 3.0), 2.0), 3, 2),
    "normal of stds": (lambda: torch.normal(3.0, torch.full((N,), 2.0)), 3, 2),
    "normal of both": (lambda: torch.normal(torch.full((N,), 3.0), torch.tensor(2.0)), 3, 2),
    "randint": (lambda: torch.randint(7, (N,)).float(), 3, 2),
    "randint from": (lambda: torch.randint(-3, 4, (N,)).float(), 0, 2),
    "randint_like": (lambda: torch.randint_like(torch.empty(N), 7), 3, 2),
    "randint_like from": (lambda: torch.randint_like(torch.empty(N), -3, 4), 0, 2),
    "random_": (lambda: torch.empty(N).random_(7), 3, 2),
    "random_ from": (lambda: torch.empty(N).random_(-3, 4), 0, 2),
    "bernoulli": (lambda: torch.bernoulli(torch.full((N,), 0.2)), 0.2, 0.4),
    "bernoulli p": (lambda: torch.bernoulli(torch.empty(N), 0.2), 0.2, 0.4),
    "bernoulli_": (lambda: torch.empty(N).bernoulli_(0.2), 0.2, 0.4),
    "bernoulli_ of": (lambda: torch.empty(N).bernoulli_(torch.full((N,), 0.2)), 0.2, 0.4),
    "exponential_": (lambda: torch.empty(N).exponential_(2.0), 0.5, 0.5),
    "geometric_": (lambda: torch.empty(N).geometric_(0.5), 2, 2**0.5),
    "log_normal_": (lambda: torch.empty(N).log_normal_(0, 0.5).log(), 0, 0.5),
    "cauchy_": (lambda: torch.empty(N).cauchy_(1, 2).sub(1).div(2).atan(), 0, 3.14159 * 12**-0.5),
    "randperm": (lambda: torch.randperm(N).float(), (N - 1) / 2, N * 12**-0.5),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_numbers_have_the_mean_and_deviation_of_their_distribution(name: str) -> None:
    make, mean, deviation = MOMENTS[name]
    numbers = draw(make)
    with torch.random.fork_rng():
        theirs = make()
    assert (numbers.shape, numbers.dtype) == (theirs.shape, theirs.dtype)
    assert abs(numbers.double().mean() - mean) < 5 * deviation / N**0.5
    assert abs(numbers.double().std() - deviation) < 0.03 * deviation
    assert torch.equal(numbers, draw(make))
    assert not torch.equal(numbers, draw(make, key=OTHER))


def test_normal_numbers_are_normal() -> None:
    numbers = draw(torch.randn, N).sort().values
    theory = torch.special.ndtr(numbers)
    assert (theory - (torch.arange(N) + 0.5) / N).abs().max() < 2 / N**0.5


def test_integers_stay_in_their_range_and_permutations_are_such() -> None:
    integers = draw(torch.randint, -2, 3, (1000,))
    assert integers.unique().tolist() == [-2, -1, 0, 1, 2]
    assert draw(torch.randperm, 100).sort().values.tolist() == list(range(100))


def test_shapes_without_elements_and_without_dims_work() -> None:
    assert draw(F.dropout, torch.ones(0, 3), 0.5).shape == (0, 3)
    assert draw(torch.randn, ()).shape == ()
    assert draw(torch.randperm, 0).shape == (0,)


@pytest.mark.parametrize("train", [True, False])
def test_inference_mode_draws_as_any_other(train: bool) -> None:
    x = torch.ones(2, 3, 4, 6)
    expected = draw(F.dropout, x, 0.5, train)
    with torch.inference_mode():
        assert torch.equal(draw(F.dropout, x, 0.5, train), expected)
        draw(nn.LSTM(6, 3, num_layers=2, dropout=0.5).train(train), x[0])


def test_attention_without_dropout_is_left_to_torch() -> None:
    x = torch.randn(2, 3, 4, 6)
    assert torch.equal(
        draw(F.scaled_dot_product_attention, x, x, x), F.scaled_dot_product_attention(x, x, x)
    )


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "poisson": (lambda: torch.poisson(torch.ones(3)), "`aten.poisson.default` has no replacement"),
    "multinomial": (lambda: torch.multinomial(torch.ones(3), 1), "aten.multinomial.default"),
    "gamma": (lambda: torch._standard_gamma(torch.ones(3)), "aten._standard_gamma.default"),
    "rrelu": (lambda: F.rrelu(torch.ones(3), training=True), "aten.rrelu_with_noise.default"),
    "generator": (lambda: torch.rand(3, generator=torch.Generator()), "is given a generator"),
    "in place": (lambda: torch.ones(3).normal_(generator=torch.Generator()), "given a generator"),
    "complex": (lambda: torch.randn(3, dtype=torch.complex64), "type torch.complex64"),
    "range": (lambda: torch.randint(-(1 << 60), 1 << 60, (3,)), "random integers from"),
    "all integers": (lambda: torch.empty(3).random_(), "aten.random_.default"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_replacement_is_an_error(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(CaptureError) as error:
        draw(function)
    assert message in str(error.value)
    assert "in the network" in str(error.value)
    assert "pass it in as an argument" in str(error.value)


def test_what_is_replaced_is_what_torch_calls_random() -> None:
    assert all(torch.Tag.nondeterministic_seeded in op.tags for op in REPLACEMENTS)
