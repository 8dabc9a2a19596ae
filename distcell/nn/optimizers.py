"""Optimizers: torch's own with MindSpore's argument names."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT


class SGD(torch.optim.SGD):
    """Stochastic gradient descent.

    Args:
        params: parameters, or groups of them as torch takes them.
        learning_rate: the step size.
        momentum: the part of the last step that is kept.
        dampening: the part of the gradient that momentum leaves out.
        weight_decay: added to the gradient, times the weight.
        nesterov: whether to look ahead.

    >>> SGD([torch.nn.Parameter(torch.zeros(1))], learning_rate=0.5).param_groups[0]["lr"]
    0.5
    """

    def __init__(
        self,
        params: ParamsT,
        learning_rate: float = 0.1,
        *,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr=learning_rate,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
        )


class Momentum(torch.optim.SGD):
    """Stochastic gradient descent with momentum.

    Args:
        params: parameters, or groups of them as torch takes them.
        learning_rate: the step size.
        momentum: the part of the last step that is kept.
        weight_decay: added to the gradient, times the weight.
        use_nesterov: whether to look ahead.

    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> Momentum([weight], 0.1, 0.9).param_groups[0]["momentum"]
    0.9
    """

    def __init__(
        self,
        params: ParamsT,
        learning_rate: float,
        momentum: float,
        weight_decay: float = 0.0,
        *,
        use_nesterov: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr=learning_rate,
            momentum=momentum,
            weight_decay=weight_decay,
            nesterov=use_nesterov,
        )


class Adam(torch.optim.Adam):
    """Adam.

    Args:
        params: parameters, or groups of them as torch takes them.
        learning_rate: the step size.
        beta1: decay of the mean of gradients.
        beta2: decay of the mean of their squares.
        eps: added to the denominator.
        weight_decay: added to the gradient, times the weight.

    >>> Adam([torch.nn.Parameter(torch.zeros(1))], beta1=0.8).param_groups[0]["betas"]
    (0.8, 0.999)
    """

    def __init__(
        self,
        params: ParamsT,
        learning_rate: float = 1e-3,
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, lr=learning_rate, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay
        )


class AdamWeightDecay(torch.optim.AdamW):
    """Adam with weight decay apart from the gradient, with torch's bias correction.

    Args:
        params: parameters, or groups of them as torch takes them.
        learning_rate: the step size.
        beta1: decay of the mean of gradients.
        beta2: decay of the mean of their squares.
        eps: added to the denominator.
        weight_decay: the part of the weight that each step takes away, times the step size.

    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> AdamWeightDecay([weight], weight_decay=0.1).param_groups[0]["weight_decay"]
    0.1
    """

    def __init__(
        self,
        params: ParamsT,
        learning_rate: float = 1e-3,
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, lr=learning_rate, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay
        )


class RMSProp(torch.optim.RMSprop):
    """Gradients divided by the root of the mean of their squares.

    Args:
        params: parameters, or groups of them as torch takes them.
        learning_rate: the step size.
        decay: of the mean of squares.
        momentum: the part of the last step that is kept.
        epsilon: added to the denominator, after the root as in torch.
        centered: whether the mean is taken from the squares.
        weight_decay: added to the gradient, times the weight.

    >>> RMSProp([torch.nn.Parameter(torch.zeros(1))], decay=0.8).param_groups[0]["alpha"]
    0.8
    """

    def __init__(
        self,
        params: ParamsT,
        learning_rate: float = 0.1,
        *,
        decay: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-10,
        centered: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params,
            lr=learning_rate,
            alpha=decay,
            eps=epsilon,
            weight_decay=weight_decay,
            momentum=momentum,
            centered=centered,
        )


class Adagrad(torch.optim.Adagrad):
    """Gradients divided by the root of the sum of their squares.

    Args:
        params: parameters, or groups of them as torch takes them.
        accum: where the sum starts.
        learning_rate: the step size.
        weight_decay: added to the gradient, times the weight.

    >>> Adagrad([torch.nn.Parameter(torch.zeros(1))], learning_rate=0.5).param_groups[0]["lr"]
    0.5
    """

    def __init__(
        self,
        params: ParamsT,
        accum: float = 0.1,
        learning_rate: float = 1e-3,
        *,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params,
            lr=learning_rate,
            weight_decay=weight_decay,
            initial_accumulator_value=accum,
        )
