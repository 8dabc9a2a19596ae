"""Normalisations. Their parameters and buffers have torch's names (weight, bias, running_mean)."""

from __future__ import annotations

import torch

from distcell.cell import Cell


class LayerNorm(torch.nn.LayerNorm, Cell):
    """Mean 0 and variance 1 over the last dims, then scaled and shifted.

    Args:
        normalized_shape: sizes of the last dims, or of the last one.
        epsilon: added to the variance.

    >>> LayerNorm(2)(torch.tensor([1.0, 1.0]))
    tensor([0., 0.], grad_fn=<NativeLayerNormBackward0>)
    """

    def __init__(
        self, normalized_shape: int | list[int] | tuple[int, ...], epsilon: float = 1e-5
    ) -> None:
        shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, eps=epsilon)


class RMSNorm(torch.nn.RMSNorm, Cell):
    """Root mean square 1 over the last dims, then scaled.

    Args:
        normalized_shape: sizes of the last dims, or of the last one.
        epsilon: added to the mean square.

    >>> RMSNorm(2)(torch.tensor([1.0, 1.0])).detach()
    tensor([1.0000, 1.0000])
    """

    def __init__(
        self, normalized_shape: int | list[int] | tuple[int, ...], epsilon: float = 1e-6
    ) -> None:
        shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, eps=epsilon)


class BatchNorm2d(torch.nn.BatchNorm2d, Cell):
    """Mean 0 and variance 1 of each channel over the whole global batch, then scaled and shifted.

    Args:
        num_features: number of channels.
        eps: added to the variance.
        momentum: the part of the old value that the running statistics keep, as in MindSpore:
            torch's `momentum` is one minus this.
        affine: whether there are weight and bias.

    >>> BatchNorm2d(3)(torch.zeros(2, 3, 4, 4)).shape
    torch.Size([2, 3, 4, 4])
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.9, affine: bool = True
    ) -> None:
        super().__init__(num_features, eps=eps, momentum=1 - momentum, affine=affine)


class BatchNorm1d(torch.nn.BatchNorm1d, Cell):
    """Mean 0 and variance 1 of each channel over the whole global batch, then scaled and shifted.

    Args:
        num_features: number of channels.
        eps: added to the variance.
        momentum: the part of the old value that the running statistics keep, as in MindSpore:
            torch's `momentum` is one minus this.
        affine: whether there are weight and bias.

    >>> BatchNorm1d(3)(torch.zeros(2, 3)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.9, affine: bool = True
    ) -> None:
        super().__init__(num_features, eps=eps, momentum=1 - momentum, affine=affine)


class BatchNorm3d(torch.nn.BatchNorm3d, Cell):
    """Mean 0 and variance 1 of each channel over the whole global batch, then scaled and shifted.

    Args:
        num_features: number of channels.
        eps: added to the variance.
        momentum: the part of the old value that the running statistics keep, as in MindSpore:
            torch's `momentum` is one minus this.
        affine: whether there are weight and bias.

    >>> BatchNorm3d(3)(torch.zeros(2, 3, 4, 4, 4)).shape
    torch.Size([2, 3, 4, 4, 4])
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.9, affine: bool = True
    ) -> None:
        super().__init__(num_features, eps=eps, momentum=1 - momentum, affine=affine)


SyncBatchNorm = BatchNorm2d
"""MindSpore's name of a batch norm over all ranks, which every batch norm is here."""


class GroupNorm(torch.nn.GroupNorm, Cell):
    """Mean 0 and variance 1 of each group of channels of each sample, then scaled and shifted.

    Args:
        num_groups: number of groups.
        num_channels: number of channels.
        eps: added to the variance.
        affine: whether there are weight and bias.

    >>> GroupNorm(2, 4)(torch.zeros(2, 4, 3, 3)).shape
    torch.Size([2, 4, 3, 3])
    """

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine)
