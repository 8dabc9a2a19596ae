"""One tiny module of each kind that people use, split by its batch and by its weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.training import Batch, History, assert_equal, simulated, train

F64 = torch.float64
BATCH = 6

torch.set_num_threads(1)


class Net(nn.Module):
    """Parts, a function of them and of the inputs, and a loss."""

    def __init__(self, call: Callable[..., Tensor], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
            else:
                self.register_parameter(name, nn.Parameter(part))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.call(self, *inputs).square().mean()


def layer(part: nn.Module) -> Net:
    return Net(lambda net, x: net.part(x), part=part)


def recurrent(kind: type[nn.RNNBase], **options: bool | int) -> Net:
    return Net(lambda net, x: net.part(x)[0], part=kind(4, 6, batch_first=True, **options))


def frozen(part: nn.Module, *rest: nn.Module) -> Net:
    return layer(nn.Sequential(part.requires_grad_(False), *rest))


def linear(then: Callable[[Tensor], Tensor], ins: int = 4, outs: int = 8) -> Net:
    return Net(lambda net, x: then(net.up(x)), up=nn.Linear(ins, outs))


def attention(*, mask: Tensor | None = None, **options: bool) -> Net:
    def call(net: Net, x: Tensor, *memory: Tensor) -> Tensor:
        keys = memory[0] if memory else x
        return net.part(x, keys, keys, attn_mask=mask, need_weights=False, **options)[0]

    return Net(call, part=nn.MultiheadAttention(8, 4, batch_first=True))


def bag(mode: str) -> Net:
    return Net(lambda net, ids: net.part(ids), part=nn.EmbeddingBag(10, 4, mode=mode))


def sdpa(mask: Tensor) -> Net:
    def call(net: Net, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in net.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return net.o(y.transpose(1, 2).flatten(2))

    return Net(call, qkv=nn.Linear(8, 24), o=nn.Linear(8, 8))


def padded_attention() -> Net:
    def call(net: Net, x: Tensor) -> Tensor:
        hidden = x[..., 0] > 1
        return net.part(x, x, x, key_padding_mask=hidden, need_weights=True)[0]

    return Net(call, part=nn.MultiheadAttention(8, 4, batch_first=True))


def scattered(net: Net, x: Tensor, ids: Tensor) -> Tensor:
    y = net.up(x)
    return torch.zeros(BATCH, 9, dtype=y.dtype).scatter_add(1, ids, y[:, : ids.shape[1]])


def encoder(**options: bool) -> Net:
    part = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, **options)
    return layer(part)


VECTOR, SEQUENCE, IMAGE, TOKENS = (4,), (5, 8), (4, 6, 6), "tokens"
CAUSAL = torch.ones(5, 5).tril().bool()
BIAS = torch.linspace(-1, 1, 25, dtype=F64).reshape(5, 5)

# name: what builds it, and the shapes of its inputs without the batch; "tokens" are ids
MODULES: dict[str, tuple[Callable[[], Net], tuple[tuple[int, ...] | str, ...]]] = {
    "lstm": (lambda: recurrent(nn.LSTM), ((3, 4),)),
    "lstm-2-layers-both-ways": (
        lambda: recurrent(nn.LSTM, num_layers=2, bidirectional=True),
        ((3, 4),),
    ),
    "gru": (lambda: recurrent(nn.GRU), ((3, 4),)),
    "rnn": (lambda: recurrent(nn.RNN), ((3, 4),)),
    "lstm-cell": (lambda: Net(lambda n, x: n.part(x)[0], part=nn.LSTMCell(4, 8)), (VECTOR,)),
    "embedding-padding": (lambda: layer(nn.Embedding(10, 4, padding_idx=3)), (TOKENS,)),
    "embedding": (lambda: layer(nn.Embedding(10, 4)), (TOKENS,)),
    "embedding-scaled": (lambda: layer(nn.Embedding(10, 4, scale_grad_by_freq=True)), (TOKENS,)),
    "bag-sum": (lambda: bag("sum"), (TOKENS,)),
    "bag-mean": (lambda: bag("mean"), (TOKENS,)),
    "bag-max": (lambda: bag("max"), (TOKENS,)),
    "conv1d": (lambda: layer(nn.Conv1d(5, 8, 3, padding=1)), (SEQUENCE,)),
    "conv2d-stride-dilation": (
        lambda: layer(nn.Conv2d(4, 8, 2, stride=2, dilation=2, bias=False)),
        (IMAGE,),
    ),
    "conv3d": (lambda: layer(nn.Conv3d(2, 4, 2)), ((2, 3, 3, 3),)),
    "conv-circular": (
        lambda: layer(nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")),
        (IMAGE,),
    ),
    "conv-transpose": (lambda: layer(nn.ConvTranspose2d(4, 8, 3, stride=2, padding=1)), (IMAGE,)),
    "conv-transpose-groups": (lambda: layer(nn.ConvTranspose2d(4, 8, 2, groups=2)), (IMAGE,)),
    "conv-groups": (lambda: layer(nn.Conv2d(4, 8, 3, groups=2)), (IMAGE,)),
    "conv-depthwise": (lambda: layer(nn.Conv2d(4, 8, 3, groups=4)), (IMAGE,)),
    "max-pool-padding": (
        lambda: layer(nn.Sequential(nn.Conv2d(4, 4, 1), nn.MaxPool2d(3, 2, padding=1))),
        (IMAGE,),
    ),
    "max-pool-1d": (
        lambda: layer(nn.Sequential(nn.Conv1d(5, 4, 1), nn.MaxPool1d(3, 2, padding=1))),
        (SEQUENCE,),
    ),
    "avg-pool-padding": (
        lambda: layer(
            nn.Sequential(
                nn.Conv2d(4, 4, 1), nn.AvgPool2d(3, 2, padding=1, count_include_pad=False)
            )
        ),
        (IMAGE,),
    ),
    "adaptive-pools": (
        lambda: layer(
            nn.Sequential(nn.Conv2d(4, 4, 1), nn.AdaptiveMaxPool2d(4), nn.AdaptiveAvgPool2d(2))
        ),
        (IMAGE,),
    ),
    **{
        f"interpolate-{mode}": (
            lambda mode=mode: Net(
                lambda n, x: F.interpolate(n.part(x), scale_factor=1.5, mode=mode),
                part=nn.Conv2d(4, 4, 1),
            ),
            (IMAGE,),
        )
        for mode in ("nearest", "bilinear", "bicubic", "area")
    },
    "interpolate-linear": (
        lambda: Net(
            lambda n, x: F.interpolate(n.part(x), size=12, mode="linear"), part=nn.Conv1d(5, 4, 1)
        ),
        (SEQUENCE,),
    ),
    "batch-norm": (lambda: layer(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 8))), (VECTOR,)),
    "batch-norm-after-frozen": (
        lambda: frozen(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)),
        (IMAGE,),
    ),
    "layer-norm": (
        lambda: layer(nn.Sequential(nn.LayerNorm((5, 8)), nn.Linear(8, 4))),
        (SEQUENCE,),
    ),
    "group-norm-after-frozen": (
        lambda: frozen(nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 1)),
        (IMAGE,),
    ),
    "instance-norm": (
        lambda: layer(nn.Sequential(nn.InstanceNorm2d(4, affine=True), nn.Conv2d(4, 4, 1))),
        (IMAGE,),
    ),
    "weight-norm": (
        lambda: layer(nn.utils.parametrizations.weight_norm(nn.Linear(4, 8))),
        (VECTOR,),
    ),
    "bilinear": (lambda: Net(lambda n, x: n.part(x, x), part=nn.Bilinear(4, 4, 8)), (VECTOR,)),
    "prelu": (lambda: layer(nn.Sequential(nn.Linear(4, 8), nn.PReLU(8))), (VECTOR,)),
    "einsum": (
        lambda: Net(lambda n, x: torch.einsum("btd,hdk->bhtk", x, n.w), w=torch.randn(4, 8, 2)),
        (SEQUENCE,),
    ),
    "cumsum": (lambda: linear(lambda y: y.cumsum(-1)), (VECTOR,)),
    "cumsum-batch": (lambda: linear(lambda y: y.cumsum(0)), (VECTOR,)),
    "cumprod": (lambda: linear(lambda y: y.cumprod(-1)), (VECTOR,)),
    "sort": (lambda: linear(lambda y: y.sort(-1, descending=True)[0] * torch.arange(8)), (VECTOR,)),
    "sort-batch": (lambda: linear(lambda y: y.sort(0)[0] * torch.arange(6)[:, None]), (VECTOR,)),
    "topk": (lambda: linear(lambda y: y.topk(3)[0]), (VECTOR,)),
    "topk-gather": (
        lambda: linear(lambda y: y.exp().gather(1, y.topk(3, dim=1, largest=False)[1])),
        (VECTOR,),
    ),
    "max-min": (lambda: linear(lambda y: y.max(1)[0] + y.amin(1) + y.min(0)[0].sum()), (VECTOR,)),
    "gather": (
        lambda: Net(lambda n, x, i: n.up(x).gather(1, i), up=nn.Linear(4, 10)),
        (VECTOR, TOKENS),
    ),
    "scatter-add": (lambda: Net(scattered, up=nn.Linear(4, 8)), (VECTOR, TOKENS)),
    "scatter": (
        lambda: Net(lambda n, x, i: n.up(x).scatter(1, i[:, :1], 0.5), up=nn.Linear(4, 10)),
        (VECTOR, TOKENS),
    ),
    "index-select": (
        lambda: Net(lambda n, x, i: n.up(x).index_select(0, i[:, 0] % 6), up=nn.Linear(4, 8)),
        (VECTOR, TOKENS),
    ),
    "index": (
        lambda: Net(lambda n, x, i: n.up(x)[torch.arange(6), i[:, 0]], up=nn.Linear(4, 10)),
        (VECTOR, TOKENS),
    ),
    "masked-fill": (lambda: linear(lambda y: y.masked_fill(y > 0, -1.0).softmax(-1)), (VECTOR,)),
    "where-clamp": (lambda: linear(lambda y: torch.where(y > 0, y, y.clamp(min=-0.5))), (VECTOR,)),
    "one-hot": (
        lambda: Net(lambda n, i: n.up(F.one_hot(i, 10).to(F64)), up=nn.Linear(10, 4, bias=False)),
        (TOKENS,),
    ),
    "softmax-batch": (lambda: linear(lambda y: y.softmax(0) * y), (VECTOR,)),
    "logsumexp": (lambda: linear(lambda y: y.logsumexp(1) + y.log_softmax(0)[:, 0]), (VECTOR,)),
    "norms": (
        lambda: linear(lambda y: F.normalize(y, dim=0) + y.norm(dim=1, keepdim=True)),
        (VECTOR,),
    ),
    "wide-norm": (
        lambda: linear(lambda y: torch.linalg.vector_norm(y.float(), dtype=F64) + y),
        (VECTOR,),
    ),
    "var-std": (lambda: linear(lambda y: y.var(0) + y.std(1)[:, None]), (VECTOR,)),
    "flip-roll": (lambda: linear(lambda y: y.flip(0) * y.roll(1, 0) + y.roll(2, 1)), (VECTOR,)),
    "pad-unfold": (lambda: linear(lambda y: F.pad(y, (1, 2)).unfold(1, 3, 2)), (VECTOR,)),
    "chunk-cat": (lambda: linear(lambda y: torch.cat(y.chunk(3, 1)[::-1], 1)), (VECTOR,)),
    "stack-unbind": (lambda: linear(lambda y: torch.stack(y.unbind(1)[::2], 0)), (VECTOR,)),
    "repeat-tile": (
        lambda: linear(lambda y: y.repeat(2, 1) + y.repeat_interleave(2, 0)),
        (VECTOR,),
    ),
    "tril-outer": (lambda: linear(lambda y: (y @ y.T).tril()), (VECTOR,)),
    "distance": (lambda: linear(lambda y: torch.cdist(y, y.detach() + 1)), (VECTOR,)),
    "cosine": (lambda: linear(lambda y: F.cosine_similarity(y[:, None], y[None], -1)), (VECTOR,)),
    "pixel-shuffle": (
        lambda: layer(nn.Sequential(nn.Conv2d(4, 8, 1), nn.PixelShuffle(2))),
        (IMAGE,),
    ),
    "unfold-fold": (
        lambda: Net(
            lambda n, x: F.fold(F.unfold(n.part(x), 2, stride=2), (6, 6), 2, stride=2),
            part=nn.Conv2d(4, 4, 1),
        ),
        (IMAGE,),
    ),
    "gru-cell": (lambda: Net(lambda n, x: n.part(x), part=nn.GRUCell(4, 8)), (VECTOR,)),
    "lstm-projection": (lambda: recurrent(nn.LSTM, proj_size=2), ((3, 4),)),
    "reflection-pad": (
        lambda: layer(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReflectionPad2d(1), nn.LPPool2d(2, 2))),
        (IMAGE,),
    ),
    "max-unpool": (
        lambda: Net(
            lambda n, x: F.max_unpool2d(*F.max_pool2d(n.part(x), 2, return_indices=True), 2),
            part=nn.Conv2d(4, 4, 1),
        ),
        (IMAGE,),
    ),
    "response-norm": (
        lambda: layer(nn.Sequential(nn.Conv2d(4, 8, 1), nn.LocalResponseNorm(3))),
        (IMAGE,),
    ),
    "glu": (lambda: linear(F.glu), (VECTOR,)),
    "grid-sample": (
        lambda: Net(
            lambda n, x: F.grid_sample(
                x,
                F.affine_grid(n.up(x.mean((2, 3))).view(-1, 2, 3).tanh(), x.shape, False),
                align_corners=False,
            ),
            up=nn.Linear(4, 6),
        ),
        (IMAGE,),
    ),
    **{
        f"cross-entropy-{name}": (
            lambda options=options: Net(
                lambda n, x, i: F.cross_entropy(n.up(x), i[:, 0], **options), up=nn.Linear(4, 8)
            ),
            (VECTOR, TOKENS),
        )
        for name, options in {
            "mean": {},
            "sum": {"reduction": "sum"},
            "none": {"reduction": "none"},
            "ignored": {"ignore_index": 3},
            "smooth": {"label_smoothing": 0.1},
            "weights": {"weight": torch.linspace(0.5, 1, 8, dtype=F64), "label_smoothing": 0.1},
        }.items()
    },
    "cross-entropy-shares": (
        lambda: Net(lambda n, x: F.cross_entropy(n.up(x), x.softmax(1)), up=nn.Linear(4, 4)),
        (VECTOR,),
    ),
    "losses": (
        lambda: Net(
            lambda n, x: (
                F.kl_div(n.up(x).log_softmax(1), x.softmax(1), reduction="batchmean")
                + F.huber_loss(n.up(x), x)
                + F.binary_cross_entropy_with_logits(n.up(x), x.sigmoid())
                + F.poisson_nll_loss(n.up(x), x.exp())
                + F.triplet_margin_loss(n.up(x), x, x.flip(0))
                + F.cosine_embedding_loss(n.up(x), x, x[:, 0].sign())
                + F.multi_margin_loss(n.up(x), x.argmax(1))
                + F.multilabel_soft_margin_loss(n.up(x), (x > 0).to(F64))
            ),
            up=nn.Linear(4, 4),
        ),
        (VECTOR,),
    ),
    "attention": (attention, (SEQUENCE,)),
    "attention-causal": (lambda: attention(mask=~CAUSAL, is_causal=True), (SEQUENCE,)),
    "attention-bool-mask": (lambda: attention(mask=~CAUSAL), (SEQUENCE,)),
    "attention-float-mask": (lambda: attention(mask=BIAS), (SEQUENCE,)),
    "attention-padding": (padded_attention, (SEQUENCE,)),
    "attention-cross": (attention, (SEQUENCE, (7, 8))),
    "sdpa-bool-mask": (lambda: sdpa(CAUSAL), (SEQUENCE,)),
    "sdpa-float-mask": (lambda: sdpa(BIAS), (SEQUENCE,)),
    "encoder": (encoder, (SEQUENCE,)),
    "encoder-norm-first": (lambda: encoder(norm_first=True), (SEQUENCE,)),
    "decoder": (
        lambda: Net(
            lambda n, x, m: n.part(x, m),
            part=nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0, batch_first=True),
        ),
        (SEQUENCE, (7, 8)),
    ),
}


def build(name: str) -> nn.Module:
    return MODULES[name][0]().to(F64)


def batches(name: str, steps: int = 2) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)

    def one(shape: tuple[int, ...] | str) -> Tensor:
        if isinstance(shape, str):
            return torch.randint(0, 8, (BATCH, 4), generator=generator)
        return torch.randn((BATCH, *shape), generator=generator, dtype=F64)

    return [tuple(one(shape) for shape in MODULES[name][1]) for _ in range(steps)]


@cache
def on_one_device(name: str) -> History:
    return train(lambda: build(name), batches(name), optimizer="sgd", plain=True)


def write_strategy(name: str, dim: int, path: Path, mesh: str) -> str:
    """A strategy that splits a dim of every parameter by axis tp, and inputs by dp if there is."""
    cells: dict[str, dict[str, list[str]]] = {}
    for path_of, parameter in build(name).named_parameters():
        at = dim % parameter.dim()
        entry = ["tp" if i == at else "_" for i in range(parameter.dim())]
        cell, _, own = path_of.rpartition(".")
        cells.setdefault(cell or "", {})[own] = entry
    lines = ["distcell: 1", f"mesh: {mesh}", "cells:"]
    for cell, params in cells.items():
        texts = ", ".join(f"{own}: [{', '.join(entry)}]" for own, entry in params.items())
        lines.append(f'  "{cell}": {{params: {{{texts}}}}}')
    if "dp" in mesh:
        lines.append('inputs: {"*": [dp]}')
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_trains_over_a_split_batch_as_on_one_device(name: str) -> None:
    # 6 rows on 4 ranks
    found = train(lambda: build(name), batches(name), simulated(4, "data"), optimizer="sgd")
    assert_equal(found, on_one_device(name), F64)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_trains_over_split_weights_as_on_one_device(name: str, tmp_path: Path) -> None:
    strategy = write_strategy(name, 0, tmp_path / "tp.yaml", "{tp: -1}")
    found = train(lambda: build(name), batches(name), simulated(2, strategy), optimizer="sgd")
    assert_equal(found, on_one_device(name), F64)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_a_module_trains_over_both_as_on_one_device(name: str, tmp_path: Path) -> None:
    strategy = write_strategy(name, -1, tmp_path / "both.yaml", "{dp: 2, tp: -1}")
    found = train(lambda: build(name), batches(name), simulated(4, strategy), optimizer="sgd")
    assert_equal(found, on_one_device(name), F64)
