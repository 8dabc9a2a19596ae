"""Lowerings where a count is zero, a row is masked, or a result is not asked for."""

import itertools

import pytest
import torch

from distcell.graph import Op, Ref
from distcell.rules import table
from distcell.rules.check import check_rule

INF, NAN = float("inf"), float("nan")
F64 = torch.float64
IGNORED = {
    "none": [0, 2, 4, 1],
    "all": [-100] * 4,
    "of one rank": [-100, -100, 1, 3],
    "and weights of zero": [-100, 0, -100, 0],
}


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=F64)


def run(target, *args):
    return table.torch_operator(target)(*args)


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, [0.0, 1.0, 2.0, 3.0, 4.0], [0.0] * 5])
@pytest.mark.parametrize("ignored", IGNORED)
def test_the_likelihood_of_ignored_rows(ignored, weights):
    scores, targets = normal(4, 5), torch.tensor(IGNORED[ignored])
    scores[0] = NAN if ignored != "none" else 0.0
    weights = None if weights is None else torch.tensor(weights, dtype=F64)
    for reduction in (0, 1, 2):
        given = (scores, targets, weights, reduction, -100)
        check_rule("aten.nll_loss_forward.default", *given, ways=(2,))
        loss, total = run("aten.nll_loss_forward.default", *given)
        for gradient in (1.0, INF):
            grad = torch.full_like(loss, gradient)
            check_rule("aten.nll_loss_backward.default", grad, *given, total, ways=(2,))


@pytest.mark.parametrize(
    "name",
    "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy".split(),
)
def test_the_mean_loss_of_nothing(name):
    empty = torch.zeros(0, 3, dtype=F64)
    weight = (None,) if name.startswith("binary") else ()
    more = (1.0,) if name in ("smooth_l1_loss", "huber_loss") else ()
    check_rule(f"aten.{name}.default", empty, empty, *weight, 1)
    given = (torch.ones((), dtype=F64), empty, empty, *weight, 1, *more)
    check_rule(f"aten.{name}_backward.default", *given)


@pytest.mark.slow
@pytest.mark.parametrize("name", "var std var_mean std_mean".split())
def test_a_variance_without_freedom(name):
    """Torch has infinity where something is left over nothing, and no number for zero over zero."""
    x = torch.cat([normal(3, 4), torch.ones(1, 4, dtype=F64)])
    for correction, dims in itertools.product((3, 4, 7), ((0,), (1,), None)):
        check_rule(f"aten.{name}.correction", x, dims, correction=correction, ways=(2,))


@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ["_softmax", "_log_softmax"])
def test_a_softmax_of_masked_rows(name, dim):
    x = normal(4, 5)
    x[1], x[2, :2], x[3, 1] = -INF, -INF, INF
    check_rule(f"aten.{name}.default", x, dim, False)
    check_rule("aten._safe_softmax.default", x, dim)
    made = run(f"aten.{name}.default", x, dim, False)
    check_rule(f"aten.{name}_backward_data.default", normal(4, 5), made, dim, F64)


def masks(count):
    return [mask for mask in itertools.product((True, False), repeat=count) if any(mask)]


STATISTICS = (normal(3), normal(3), normal(3), normal(3).abs(), normal(3), normal(3).abs())
CONVOLUTION = ((1,), (0,), (1,), False, (0,), 1)
MASKED = {
    "native_layer_norm_backward": (
        3,
        (normal(2, 3), normal(2, 3), (3,), normal(2, 1), normal(2, 1), normal(3), normal(3)),
    ),
    "native_group_norm_backward": (
        3,
        (normal(2, 4, 3), normal(2, 4, 3), normal(2, 2), normal(2, 2), normal(4), 2, 4, 3, 2),
    ),
    "native_batch_norm_backward": (
        3,
        (normal(4, 3), normal(4, 3), *STATISTICS[:1], *STATISTICS[2:], True, 1e-5),
    ),
    "convolution_backward": (
        3,
        (normal(2, 6, 3), normal(2, 4, 5), normal(6, 4, 3), (6,), *CONVOLUTION),
    ),
    "grid_sampler_2d_backward": (
        2,
        (normal(3, 2, 2, 2), normal(3, 2, 4, 4), normal(3, 2, 2, 2), 0, 0, False),
    ),
    "grid_sampler_3d_backward": (
        2,
        (normal(2, 1, 2, 2, 2), normal(2, 1, 3, 3, 3), normal(2, 2, 2, 2, 3), 0, 0, False),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKED)
def test_every_mask_of_results(name):
    count, args = MASKED[name]
    for mask in masks(count):
        target = f"aten.{name}.default"
        op = Op(target, (*(Ref("x") if isinstance(a, torch.Tensor) else a for a in args), mask))
        found = table.asked_for(run(target, *args, mask), table.output_mask(op))
        assert len(found) == sum(mask)
        if table.find(target):
            check_rule(target, *args, mask, ways=(2,))
