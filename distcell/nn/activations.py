"""Activations: functions of each element, or along one dim."""

from __future__ import annotations

import torch

from distcell.cell import Cell


class ReLU(torch.nn.ReLU, Cell):
    """The larger of x and 0.

    >>> ReLU()(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """


class ReLU6(torch.nn.ReLU6, Cell):
    """x between 0 and 6.

    >>> ReLU6()(torch.tensor([-1.0, 7.0]))
    tensor([0., 6.])
    """


class LeakyReLU(torch.nn.LeakyReLU, Cell):
    """x, times alpha where it is negative.

    Args:
        alpha: the slope there; 0.2 as in MindSpore, torch's is 0.01.

    >>> LeakyReLU()(torch.tensor([-1.0, 2.0]))
    tensor([-0.2000,  2.0000])
    """

    def __init__(self, alpha: float = 0.2) -> None:
        super().__init__(alpha)


class ELU(torch.nn.ELU, Cell):
    """x, or alpha (exp(x) - 1) where it is negative.

    Args:
        alpha: how far below 0 it goes.

    >>> ELU()(torch.tensor([2.0]))
    tensor([2.])
    """

    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__(alpha)


class PReLU(torch.nn.PReLU, Cell):
    """x, times a trained weight where it is negative.

    Args:
        channel: number of weights: 1, or that of the channels.
        w: their first value.

    >>> PReLU()(torch.tensor([2.0])).detach()
    tensor([2.])
    """

    def __init__(self, channel: int = 1, w: float = 0.25) -> None:
        super().__init__(channel, w)


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


class Mish(torch.nn.Mish, Cell):
    """x times the tanh of its softplus.

    >>> Mish()(torch.tensor([0.0]))
    tensor([0.])
    """


class HSwish(torch.nn.Hardswish, Cell):
    """x times its hard sigmoid.

    >>> HSwish()(torch.tensor([-3.0, 3.0]))
    tensor([-0., 3.])
    """


class HSigmoid(torch.nn.Hardsigmoid, Cell):
    """x / 6 + 1 / 2 between 0 and 1.

    >>> HSigmoid()(torch.tensor([0.0]))
    tensor([0.5000])
    """


class Sigmoid(torch.nn.Sigmoid, Cell):
    """1 / (1 + exp(-x)).

    >>> Sigmoid()(torch.tensor([0.0]))
    tensor([0.5000])
    """


class LogSigmoid(torch.nn.LogSigmoid, Cell):
    """The logarithm of the sigmoid.

    >>> LogSigmoid()(torch.tensor([0.0]))
    tensor([-0.6931])
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


class LogSoftmax(torch.nn.LogSoftmax, Cell):
    """The logarithm of softmax along one dim.

    Args:
        axis: the dim of the tensor.

    >>> LogSoftmax()(torch.zeros(2))
    tensor([-0.6931, -0.6931])
    """

    def __init__(self, axis: int = -1) -> None:
        super().__init__(dim=axis)
