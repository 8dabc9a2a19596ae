"""Dense, embedding, dropout and activations."""

from __future__ import annotations

import torch

from distcell.cell import Cell

# torch's class stands before Cell, so that its forward is the cell's. Cell's `__call__` still
# comes before torch's, because only `torch.nn.Module` itself defines one.


class Dense(torch.nn.Linear, Cell):
    """A linear layer: `x @ weight.T + bias`, weight `[out_channels, in_channels]`.

    Args:
        in_channels: size of the last dim that enters.
        out_channels: size of the last dim that leaves.
        has_bias: whether a bias is added.

    >>> Dense(3, 4)(torch.zeros(2, 3)).shape
    torch.Size([2, 4])
    """

    def __init__(self, in_channels: int, out_channels: int, has_bias: bool = True) -> None:
        super().__init__(in_channels, out_channels, bias=has_bias)


class Embedding(torch.nn.Embedding, Cell):
    """A table of vectors, looked up by index; weight `[vocab_size, embedding_size]`.

    Args:
        vocab_size: number of rows.
        embedding_size: size of a row.
        padding_idx: the row that stays zero and gets no gradient.

    >>> Embedding(10, 4)(torch.tensor([1, 2])).shape
    torch.Size([2, 4])
    """

    def __init__(
        self, vocab_size: int, embedding_size: int, *, padding_idx: int | None = None
    ) -> None:
        super().__init__(vocab_size, embedding_size, padding_idx=padding_idx)


class Dropout(torch.nn.Dropout, Cell):
    """Sets elements to zero with probability p while training, and scales the rest up.

    The mask depends on seed, step and position alone, not on how many ranks there are.

    Args:
        p: the probability.

    >>> Dropout(p=0.5).set_train(False)(torch.ones(2))
    tensor([1., 1.])
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__(p)


class ReLU(torch.nn.ReLU, Cell):
    """The larger of x and 0.

    >>> ReLU()(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """


class GELU(torch.nn.GELU, Cell):
    """The Gaussian error linear unit.

    Args:
        approximate: True: by tanh, MindSpore's default. False: exactly, torch's default.

    >>> GELU(approximate=False)(torch.tensor([0.0]))
    tensor([0.])
    """

    def __init__(self, approximate: bool = True) -> None:
        super().__init__("tanh" if approximate else "none")


class SiLU(torch.nn.SiLU, Cell):
    """x times its sigmoid.

    >>> SiLU()(torch.tensor([0.0]))
    tensor([0.])
    """


class Sigmoid(torch.nn.Sigmoid, Cell):
    """1 / (1 + exp(-x)).

    >>> Sigmoid()(torch.tensor([0.0]))
    tensor([0.5000])
    """


class Tanh(torch.nn.Tanh, Cell):
    """The hyperbolic tangent.

    >>> Tanh()(torch.tensor([0.0]))
    tensor([0.])
    """


class Softmax(torch.nn.Softmax, Cell):
    """exp(x), scaled to sum 1 along one dim.

    Args:
        axis: the dim of the tensor; MindSpore calls it axis.

    >>> Softmax()(torch.zeros(2))
    tensor([0.5000, 0.5000])
    """

    def __init__(self, axis: int = -1) -> None:
        super().__init__(dim=axis)
