"""Losses. Means are over the global batch, however it is split."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from distcell.cell import Cell
from distcell.errors import UserTypeError, did_you_mean

_REDUCTIONS = ("mean", "sum", "none")


class MSELoss(torch.nn.MSELoss, Cell):
    """The squared difference.

    Args:
        reduction: `mean`, `sum` or `none`.

    >>> MSELoss()(torch.zeros(2), torch.ones(2))
    tensor(1.)
    """

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(reduction=_known(reduction))


class L1Loss(torch.nn.L1Loss, Cell):
    """The absolute difference.

    Args:
        reduction: `mean`, `sum` or `none`.

    >>> L1Loss()(torch.zeros(2), torch.ones(2))
    tensor(1.)
    """

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(reduction=_known(reduction))


class HuberLoss(torch.nn.HuberLoss, Cell):
    """Half the squared difference up to delta, linear beyond.

    Args:
        reduction: `mean`, `sum` or `none`.
        delta: where the line begins.

    >>> HuberLoss()(torch.zeros(2), torch.ones(2))
    tensor(0.5000)
    """

    def __init__(self, reduction: str = "mean", delta: float = 1.0) -> None:
        super().__init__(reduction=_known(reduction), delta=delta)


class SmoothL1Loss(torch.nn.SmoothL1Loss, Cell):
    """Half the squared difference over beta up to beta, the absolute difference beyond.

    Args:
        beta: where the line begins.
        reduction: `mean`, `sum` or `none` (MindSpore's default).

    >>> SmoothL1Loss()(torch.zeros(2), torch.ones(2))
    tensor([0.5000, 0.5000])
    """

    def __init__(self, beta: float = 1.0, reduction: str = "none") -> None:
        super().__init__(reduction=_known(reduction), beta=beta)


class BCEWithLogitsLoss(torch.nn.BCEWithLogitsLoss, Cell):
    """The cross-entropy of independent yes-or-no labels, from logits.

    Args:
        reduction: `mean`, `sum` or `none`.
        weight: a factor for each element.
        pos_weight: a factor for the positive ones.

    >>> BCEWithLogitsLoss()(torch.zeros(1), torch.ones(1))
    tensor(0.6931)
    """

    def __init__(
        self,
        reduction: str = "mean",
        weight: Tensor | None = None,
        pos_weight: Tensor | None = None,
    ) -> None:
        super().__init__(weight, reduction=_known(reduction), pos_weight=pos_weight)


class BCELoss(torch.nn.BCELoss, Cell):
    """The cross-entropy of independent yes-or-no labels, from probabilities.

    Args:
        weight: a factor for each element.
        reduction: `mean`, `sum` or `none`.

    >>> BCELoss()(torch.tensor([0.5]), torch.ones(1))
    tensor(0.6931)
    """

    def __init__(self, weight: Tensor | None = None, reduction: str = "mean") -> None:
        super().__init__(weight, reduction=_known(reduction))


class NLLLoss(torch.nn.NLLLoss, Cell):
    """Minus the logarithm of the probability of the class, from logarithms `[batch, classes]`.

    Args:
        weight: a factor for each class.
        ignore_index: the label of elements that do not count.
        reduction: `mean`, `sum` or `none`.

    >>> NLLLoss()(torch.tensor([[-1.0, -2.0]]), torch.tensor([1]))
    tensor(2.)
    """

    def __init__(
        self, weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean"
    ) -> None:
        super().__init__(weight, ignore_index=ignore_index, reduction=_known(reduction))


class CrossEntropyLoss(torch.nn.CrossEntropyLoss, Cell):
    """The cross-entropy of classes, from logits `[batch, classes, ...]`.

    Args:
        weight: a factor for each class.
        ignore_index: the label of elements that do not count.
        reduction: `mean`, `sum` or `none`.
        label_smoothing: the part of the label that is spread over all classes.

    >>> CrossEntropyLoss()(torch.zeros(1, 2), torch.tensor([1]))
    tensor(0.6931)
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(
            weight,
            ignore_index=ignore_index,
            reduction=_known(reduction),
            label_smoothing=label_smoothing,
        )


class SoftmaxCrossEntropyWithLogits(Cell):
    """The cross-entropy of logits `[batch, classes]` with labels.

    Args:
        sparse: True: labels are classes `[batch]`. False: they are probabilities, as the logits.
        reduction: `mean`, `sum` or `none` (MindSpore's default).

    >>> SoftmaxCrossEntropyWithLogits(sparse=True)(torch.zeros(1, 2), torch.tensor([1]))
    tensor([0.6931])
    """

    def __init__(self, sparse: bool = False, reduction: str = "none") -> None:
        super().__init__()
        self.sparse, self.reduction = sparse, _known(reduction)

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Returns the loss."""
        if self.sparse == labels.is_floating_point():
            wanted = "classes" if self.sparse else "probabilities"
            raise UserTypeError(
                f"labels are {labels.dtype}, with sparse={self.sparse} they are {wanted}",
                hint=f"pass sparse={not self.sparse}",
            )
        return F.cross_entropy(logits, labels, reduction=self.reduction)


def _known(reduction: str) -> str:
    if reduction not in _REDUCTIONS:
        raise UserTypeError(
            f"no reduction `{reduction}`", hint=did_you_mean(reduction, _REDUCTIONS)
        )
    return reduction
