"""Dense, embedding, dropout, and the product of matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from distcell.cell import Cell
from distcell.nn.initializers import Init, initialize

# torch's class stands before Cell, so that its forward is the cell's. Cell's `__call__` still
# comes before torch's, because only `torch.nn.Module` itself defines one.


class Dense(torch.nn.Linear, Cell):
    """A linear layer: `x @ weight.T + bias`, weight `[out_channels, in_channels]`.

    Args:
        in_channels: size of the last dim that enters.
        out_channels: size of the last dim that leaves.
        has_bias: whether a bias is added.
        weight_init: the first values of the weight: see `initialize`; torch's when left out.
        bias_init: the same of the bias.

    >>> Dense(3, 4)(torch.zeros(2, 3)).shape
    torch.Size([2, 4])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        has_bias: bool = True,
        *,
        weight_init: Init = None,
        bias_init: Init = None,
    ) -> None:
        super().__init__(in_channels, out_channels, bias=has_bias)
        initialize(self.weight, weight_init, "weight_init")
        initialize(self.bias, bias_init, "bias_init")


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


class Identity(torch.nn.Identity, Cell):
    """What enters.

    >>> Identity()(torch.ones(2))
    tensor([1., 1.])
    """


class MatMul(Cell):
    """The product of two matrices, or vectors; dims before the last two are batches.

    Args:
        transpose_x1: whether the last two dims of the first change places.
        transpose_x2: the same of the second.

    >>> MatMul()(torch.ones(2), torch.ones(2))
    tensor(2.)
    """

    def __init__(self, transpose_x1: bool = False, transpose_x2: bool = False) -> None:
        super().__init__()
        self.transpose_x1, self.transpose_x2 = transpose_x1, transpose_x2

    def construct(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Returns the product."""
        x1 = x1.transpose(-2, -1) if self.transpose_x1 else x1
        return torch.matmul(x1, x2.transpose(-2, -1) if self.transpose_x2 else x2)
