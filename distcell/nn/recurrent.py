"""Recurrent layers and attention."""

from __future__ import annotations

import torch

from distcell.cell import Cell


class RNN(torch.nn.RNN, Cell):
    """A simple recurrent network over `[time, batch, input]`.

    Args:
        input_size: size of the last dim that enters.
        hidden_size: size of the state.
        num_layers: how many lie on another.
        nonlinearity: `tanh` or `relu`.
        has_bias: whether biases are added.
        batch_first: whether the batch comes before the time.
        dropout: between layers, while training.
        bidirectional: whether it runs backwards too.

    >>> RNN(2, 3)(torch.zeros(5, 1, 2))[0].shape
    torch.Size([5, 1, 3])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        *,
        has_bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            nonlinearity,
            bias=has_bias,
            batch_first=batch_first,
            dropout=dropout,
            bidirectional=bidirectional,
        )


class GRU(torch.nn.GRU, Cell):
    """A gated recurrent network over `[time, batch, input]`.

    Args:
        input_size: size of the last dim that enters.
        hidden_size: size of the state.
        num_layers: how many lie on another.
        has_bias: whether biases are added.
        batch_first: whether the batch comes before the time.
        dropout: between layers, while training.
        bidirectional: whether it runs backwards too.

    >>> GRU(2, 3)(torch.zeros(5, 1, 2))[0].shape
    torch.Size([5, 1, 3])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        has_bias: bool = True,
        *,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            bias=has_bias,
            batch_first=batch_first,
            dropout=dropout,
            bidirectional=bidirectional,
        )


class LSTM(torch.nn.LSTM, Cell):
    """A recurrent network with long short-term memory over `[time, batch, input]`.

    Args:
        input_size: size of the last dim that enters.
        hidden_size: size of the state.
        num_layers: how many lie on another.
        has_bias: whether biases are added.
        batch_first: whether the batch comes before the time.
        dropout: between layers, while training.
        bidirectional: whether it runs backwards too.

    >>> LSTM(2, 3)(torch.zeros(5, 1, 2))[0].shape
    torch.Size([5, 1, 3])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        has_bias: bool = True,
        *,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            bias=has_bias,
            batch_first=batch_first,
            dropout=dropout,
            bidirectional=bidirectional,
        )


class MultiheadAttention(torch.nn.MultiheadAttention, Cell):
    """Attention of several heads: `(query, key, value)` to `(output, weights)`, as torch's.

    Args:
        embed_dim: size of the last dim.
        num_heads: number of heads, which divides it.
        dropout: of the weights, while training.
        has_bias: whether biases are added.
        batch_first: whether the batch comes before the time.

    >>> x = torch.zeros(5, 1, 4)
    >>> MultiheadAttention(4, 2)(x, x, x)[0].shape
    torch.Size([5, 1, 4])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        has_bias: bool = True,
        *,
        batch_first: bool = False,
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout, bias=has_bias, batch_first=batch_first)
