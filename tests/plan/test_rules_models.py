"""Every op that common models make, forward and backward, has a rule, and the rule holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distcell.capture import capture_call
from distcell.dtype import DTYPES
from distcell.graph import DeviceArg, DtypeArg, Graph, Op, Ref
from distcell.rules.check import check_rule
from distcell.rules.table import find, implementation

torch.set_num_threads(1)
KEY = torch.tensor([1, 2, 3])


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.heads, self.dropout = heads, dropout

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).split(d, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Gpt(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.norm, self.attn = nn.LayerNorm(8), Attention(8, 2, dropout)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(8, 11, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        x = x + self.attn(self.norm(x))
        return self.head(x + self.drop(self.mlp(x)))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(11, 16), nn.RMSNorm(16)
        self.q, self.o = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.k, self.v = nn.Linear(16, 8, bias=False), nn.Linear(16, 8, bias=False)
        self.gate, self.up = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False)
        self.down = nn.Linear(24, 16, bias=False)

    def rotate(self, x: Tensor) -> Tensor:
        rates = 1.0 / 10000 ** (torch.arange(0, 4, 2) / 4)
        angles = torch.outer(torch.arange(x.shape[2]).double(), rates)
        angles = torch.cat((angles, angles), -1)
        half = torch.cat((-x[..., 2:], x[..., :2]), -1)
        return x * angles.cos() + half * angles.sin()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        b, t, d = x.shape
        rms = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        q = self.q(rms).view(b, t, 4, 4).transpose(1, 2)
        k, v = (m(rms).view(b, t, 2, 4).transpose(1, 2) for m in (self.k, self.v))
        q, k = self.rotate(q), self.rotate(k)
        k, v = (y[:, :, None].expand(b, 2, 2, t, 4).reshape(b, 4, t, 4) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, d))
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.GroupNorm(2, 4),
        nn.Dropout(0.1),
        nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 5),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3), nn.Sigmoid())


class WithLoss(nn.Module):
    def __init__(self, net: nn.Module, loss: Any) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.net(x), y)


def cross_entropy(**options: Any) -> Any:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x.flatten(0, -2), y.flatten(), **options)

    return loss


def norms(x: Tensor, y: Tensor) -> Tensor:
    a = x.var(0).sum() + x.std(1).sum() + torch.logsumexp(x, 0).sum() + x.norm()
    b = x.max(1)[0].sum() + x.amax() + F.normalize(x).sum() + torch.topk(x, 2)[0].sum()
    return a + b + torch.einsum("nc,mc->nm", x, y).softmax(0).sum() + x.cumsum(0).mean()


def pieces(x: Tensor, y: Tensor) -> Tensor:
    a = torch.where(x > 0.5, x, y).clamp(0, 1) + x.tril() + F.pad(x, (1, 1))[:, 1:-1] + x.flip(0)
    b = torch.stack([x, y]).sum(0) + x.masked_fill(y > 0.5, 0.0) + F.glu(torch.cat([x, x], 1))
    c = x.gather(1, torch.tensor([[0, 2, 1]] * 4)) + x[torch.tensor([1, 0, 0, 3])] + x.unbind(0)[0]
    d = x.repeat(2, 1)[:4] + x.index_select(0, torch.tensor([0, 3, 1, 1])) + x.roll(1, 0)
    picked = x[torch.arange(4), torch.tensor([0, 2, 1, 1])].mean() + x[:, 0].sum()
    onto = torch.zeros(4, 3).double().scatter(1, torch.tensor([[1]] * 4), y[:, :1])
    return (a + b + c + d + onto * x).sum() + picked


IDS, LABELS = torch.randint(11, (2, 6)), torch.randint(11, (2, 6))
IMAGES, CLASSES = torch.randn(4, 3, 8, 8).double(), torch.tensor([0, 4, 2, 4])
X, Y = torch.randn(4, 4).double(), torch.rand(4, 3).double()
WEIGHTS = torch.rand(11).double()

MODELS = {
    "gpt": (Gpt(), cross_entropy(), IDS, LABELS),
    "gpt with dropout": (Gpt(0.1), cross_entropy(ignore_index=3, label_smoothing=0.1), IDS, LABELS),
    "gpt with weights": (
        Gpt(),
        cross_entropy(weight=WEIGHTS, label_smoothing=0.1, reduction="sum"),
        IDS,
        LABELS,
    ),
    "llama": (Llama(), cross_entropy(), IDS, LABELS),
    "cnn": (cnn(), cross_entropy(), IMAGES, CLASSES),
    "cnn in evaluation": (cnn().eval(), cross_entropy(), IMAGES, CLASSES),
    "mse": (mlp(), F.mse_loss, X, Y),
    "l1": (mlp(), F.l1_loss, X, Y),
    "smooth l1": (mlp(), F.smooth_l1_loss, X, Y),
    "huber": (mlp(), F.huber_loss, X, Y),
    "bce": (mlp(), F.binary_cross_entropy, X, Y),
    "bce with logits": (mlp(), F.binary_cross_entropy_with_logits, X, Y),
    "kl": (mlp(), lambda a, b: F.kl_div(a, b, reduction="batchmean"), X, Y),
    "norms": (mlp(), norms, X, Y),
    "pieces": (mlp(), pieces, X, Y),
}


def graph_of(net: nn.Module, loss: Any, x: Tensor, y: Tensor) -> tuple[Graph, dict[str, Any]]:
    """The graph of a model with its loss, and values for what enters it."""
    model = WithLoss(net, loss).double()
    captured = capture_call(model, (x, y), {})
    known: dict[tuple[str, str], Any] = {("random", "key"): KEY, ("tangent", "0"): torch.ones(())}
    known["tangent", "0"] = torch.ones((), dtype=torch.float64)
    known |= {("param", path): p.detach() for path, p in model.named_parameters()}
    known |= {("buffer", path): b for path, b in model.named_buffers()}
    known |= {("constant", path): c for path, c in captured.constants.items()}
    known |= {("input", "x"): x, ("input", "y"): y}
    return captured.graph, {i.value: known[i.kind, i.path] for i in captured.graph.inputs}


def concrete(arg: Any, env: dict[str, Any]) -> Any:
    if isinstance(arg, Ref):
        return env[arg.name]
    if isinstance(arg, tuple):
        return tuple(concrete(item, env) for item in arg)
    if isinstance(arg, DtypeArg):
        return DTYPES[arg.name]
    return torch.device("cpu") if isinstance(arg, DeviceArg) else arg


def run(op: Op, env: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an op; its results go to `env`."""
    args = tuple(concrete(arg, env) for arg in op.args)
    kwargs = {key: concrete(arg, env) for key, arg in op.kwargs}
    function = torch.reshape if op.target == "aten.view.default" else implementation(op.target)
    with torch.no_grad():
        made = function(*args, **kwargs)
    parts = [part for part in made if part is not None] if op.many else [made]
    env.update(zip(op.outputs, parts, strict=True))
    return args, kwargs


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_rule_of_every_op_of_a_model_holds(name: str) -> None:
    torch.manual_seed(0)
    graph, env = graph_of(*MODELS[name])
    seen = set()
    for op in graph.ops:
        shapes = tuple(str(graph.values[n]) for n in (*op.inputs, *op.outputs))
        args, kwargs = run(op, env)
        key = (op.target, shapes, str(op.map_refs(lambda _: None).args))
        if op.target.startswith("py.") or key in seen:
            continue
        seen.add(key)
        assert find(op.target), f"no rule for {op}"
        check_rule(op.target, *args, **{k: v for k, v in kwargs.items() if k != "memory_format"})


def _without_input_gradient() -> list[tuple[nn.Module, tuple[int, ...]]]:
    return [
        (nn.Conv2d(3, 4, 3), (2, 3, 5, 5)),
        (nn.ConvTranspose1d(3, 4, 3), (2, 3, 5)),
        (nn.BatchNorm1d(3), (4, 3)),
        (nn.BatchNorm2d(3).eval(), (2, 3, 4, 4)),
        (nn.LayerNorm(3), (4, 3)),
        (nn.GroupNorm(2, 4), (2, 4, 3)),
        (nn.Linear(3, 2), (4, 3)),
    ]


@pytest.mark.parametrize(("net", "shape"), _without_input_gradient())
def test_a_captured_gradient_has_the_results_that_run_gives(
    net: nn.Module, shape: tuple[int, ...]
) -> None:
    graph = capture_call(net, (torch.randn(shape),), {}).graph
    for op in graph.ops:
        mask = next((arg for arg in op.args[-1:] if op.many and isinstance(arg, tuple)), ())
        if mask and all(isinstance(wanted, bool) for wanted in mask):
            assert sum(mask) == len(op.outputs), op
    rows = [op for op in graph.ops if op.phase == "backward"]
    assert rows
    assert not any(graph.values[name].shape == shape for op in rows for name in op.outputs)
