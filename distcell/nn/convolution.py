"""Convolution, pooling, and the step from images to vectors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from distcell.cell import Cell
from distcell.errors import UserTypeError, did_you_mean
from distcell.nn.initializers import Init, initialize

_PAD_MODES = ("same", "valid", "pad")


class Conv2d(torch.nn.Conv2d, Cell):
    """A convolution over images `[batch, channels, height, width]`.

    Args:
        in_channels: channels that enter.
        out_channels: channels that leave.
        kernel_size: height and width of the kernel, or one number for both.
        stride: how far the kernel moves.
        pad_mode: `same`: the output has the size of the input divided by the stride, rounded up.
            `valid`: nothing is padded. `pad`: `padding` on each side.
        padding: for `pad_mode="pad"` alone.
        dilation: distance of the kernel's elements.
        group: number of groups of channels.
        has_bias: whether a bias is added.
        weight_init: the first values of the weight: see `initialize`; torch's when left out.
        bias_init: the same of the bias.

    Raises:
        UserTypeError: `pad_mode` is not known, or `padding` is given with another.

    >>> Conv2d(1, 8, 3, stride=2)(torch.zeros(2, 1, 5, 5)).shape
    torch.Size([2, 8, 3, 3])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        *,
        pad_mode: str = "same",
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        group: int = 1,
        has_bias: bool = False,
        weight_init: Init = None,
        bias_init: Init = None,
    ) -> None:
        _check_padding(pad_mode, padding, _PAD_MODES)
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding=padding,
            dilation=dilation,
            groups=group,
            bias=has_bias,
        )
        self.pad_mode = pad_mode
        initialize(self.weight, weight_init, "weight_init")
        initialize(self.bias, bias_init, "bias_init")

    def forward(self, input: Tensor) -> Tensor:
        """Returns the convolution of the padded images."""
        return super().forward(_padded(self, input) if self.pad_mode == "same" else input)


class Conv1d(torch.nn.Conv1d, Cell):
    """A convolution over sequences `[batch, channels, length]`.

    Args:
        in_channels: channels that enter.
        out_channels: channels that leave.
        kernel_size: length of the kernel.
        stride: how far the kernel moves.
        pad_mode: as for `Conv2d`.
        padding: for `pad_mode="pad"` alone.
        dilation: distance of the kernel's elements.
        group: number of groups of channels.
        has_bias: whether a bias is added.
        weight_init: the first values of the weight: see `initialize`; torch's when left out.
        bias_init: the same of the bias.

    Raises:
        UserTypeError: `pad_mode` is not known, or `padding` is given with another.

    >>> Conv1d(1, 8, 3, stride=2)(torch.zeros(2, 1, 5)).shape
    torch.Size([2, 8, 3])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        *,
        pad_mode: str = "same",
        padding: int = 0,
        dilation: int = 1,
        group: int = 1,
        has_bias: bool = False,
        weight_init: Init = None,
        bias_init: Init = None,
    ) -> None:
        _check_padding(pad_mode, padding, _PAD_MODES)
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding=padding,
            dilation=dilation,
            groups=group,
            bias=has_bias,
        )
        self.pad_mode = pad_mode
        initialize(self.weight, weight_init, "weight_init")
        initialize(self.bias, bias_init, "bias_init")

    def forward(self, input: Tensor) -> Tensor:
        """Returns the convolution of the padded sequences."""
        return super().forward(_padded(self, input) if self.pad_mode == "same" else input)


class Conv2dTranspose(torch.nn.ConvTranspose2d, Cell):
    """The transpose of a convolution over images: the size grows by the stride.

    Args:
        in_channels: channels that enter.
        out_channels: channels that leave.
        kernel_size: height and width of the kernel, or one number for both.
        stride: how far the kernel moves in what leaves.
        pad_mode: `valid`, or `pad`: `padding` is cut from each side.
        padding: for `pad_mode="pad"` alone.
        dilation: distance of the kernel's elements.
        group: number of groups of channels.
        has_bias: whether a bias is added.

    Raises:
        UserTypeError: `pad_mode` is not known, or `padding` is given with another.

    >>> Conv2dTranspose(1, 8, 2, stride=2)(torch.zeros(2, 1, 5, 5)).shape
    torch.Size([2, 8, 10, 10])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        *,
        pad_mode: str = "valid",
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        group: int = 1,
        has_bias: bool = False,
    ) -> None:
        _check_padding(pad_mode, padding, _PAD_MODES[1:])
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding=padding,
            dilation=dilation,
            groups=group,
            bias=has_bias,
        )


class MaxPool2d(torch.nn.MaxPool2d, Cell):
    """The largest value of each window.

    Args:
        kernel_size: height and width of the window, or one number for both.
        stride: how far the window moves; 1 when left out, as in MindSpore.
        pad_mode: `valid`, or `pad` with `padding`.
        padding: for `pad_mode="pad"` alone.

    >>> MaxPool2d(2, stride=2)(torch.zeros(2, 1, 4, 4)).shape
    torch.Size([2, 1, 2, 2])
    """

    def __init__(
        self,
        kernel_size: int | tuple[int, int] = 1,
        stride: int | tuple[int, int] = 1,
        *,
        pad_mode: str = "valid",
        padding: int | tuple[int, int] = 0,
    ) -> None:
        _check_padding(pad_mode, padding, _PAD_MODES[1:])
        super().__init__(kernel_size, stride, padding)


class AvgPool2d(torch.nn.AvgPool2d, Cell):
    """The mean of each window.

    Args:
        kernel_size: height and width of the window, or one number for both.
        stride: how far the window moves; 1 when left out, as in MindSpore.
        pad_mode: `valid`, or `pad` with `padding`.
        padding: for `pad_mode="pad"` alone.

    >>> AvgPool2d(2, stride=2)(torch.zeros(2, 1, 4, 4)).shape
    torch.Size([2, 1, 2, 2])
    """

    def __init__(
        self,
        kernel_size: int | tuple[int, int] = 1,
        stride: int | tuple[int, int] = 1,
        *,
        pad_mode: str = "valid",
        padding: int | tuple[int, int] = 0,
    ) -> None:
        _check_padding(pad_mode, padding, _PAD_MODES[1:])
        super().__init__(kernel_size, stride, padding)


class AdaptiveAvgPool2d(torch.nn.AdaptiveAvgPool2d, Cell):
    """The mean of windows that give an output of a certain size.

    Args:
        output_size: height and width that leave, or one number for both.

    >>> AdaptiveAvgPool2d(1)(torch.zeros(2, 3, 4, 4)).shape
    torch.Size([2, 3, 1, 1])
    """

    def __init__(self, output_size: int | tuple[int, int]) -> None:
        super().__init__(output_size)


class Flatten(torch.nn.Flatten, Cell):
    """Several dims made one.

    Args:
        start_dim: the first of them.
        end_dim: the last of them.

    >>> Flatten()(torch.zeros(2, 3, 4)).shape
    torch.Size([2, 12])
    """

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__(start_dim, end_dim)


def _padded(conv: torch.nn.Conv1d | torch.nn.Conv2d, x: Tensor) -> Tensor:
    # torch's own padding="same" refuses strides, and pads the other side first.
    pads: list[int] = []
    for dim in reversed(range(len(conv.stride))):  # F.pad starts from the last dim
        size, stride = x.shape[2 + dim], conv.stride[dim]
        reach = conv.dilation[dim] * (conv.kernel_size[dim] - 1) + 1
        missing = max(((size - 1) // stride) * stride + reach - size, 0)
        pads += [missing // 2, missing - missing // 2]
    return F.pad(x, pads) if any(pads) else x


def _check_padding(pad_mode: str, padding: int | tuple[int, int], known: tuple[str, ...]) -> None:
    if pad_mode not in known:
        raise UserTypeError(f"no pad_mode `{pad_mode}`", hint=did_you_mean(pad_mode, known))
    if pad_mode != "pad" and padding not in (0, (0, 0)):
        raise UserTypeError(
            f"padding={padding} means nothing with pad_mode=`{pad_mode}`",
            hint="pass pad_mode='pad'",
        )
