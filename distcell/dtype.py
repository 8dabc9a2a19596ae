"""Short names of torch's dtypes, as they are printed and stored."""

from __future__ import annotations

import torch

NAMES: dict[torch.dtype, str] = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2",
    torch.complex64: "c64",
    torch.complex128: "c128",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in NAMES.items()}

# MindSpore's names: `from distcell import dtype as mstype; mstype.float16`.
float64, float32, float16, bfloat16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
int64, int32, int16, int8, uint8 = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8
complex64, complex128, bool_ = torch.complex64, torch.complex128, torch.bool


def name_of(dtype: torch.dtype) -> str:
    """The short name of a dtype.

    Example:
        >>> name_of(torch.bfloat16)
        'bf16'
    """
    return NAMES[dtype]


def itemsize(name: str) -> int:
    """The bytes of one element; 8 for a number of the host (`int`, `float`, `bool`).

    Example:
        >>> itemsize("f32"), itemsize("float")
        (4, 8)
    """
    dtype = DTYPES.get(name)
    return 8 if dtype is None else dtype.itemsize
