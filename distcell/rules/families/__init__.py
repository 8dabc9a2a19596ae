"""All op families. Importing this package fills the table."""

from distcell.rules.families import (
    attention,
    batch_norm,
    batched,
    convolution,
    factories,
    host,
    indexing,
    joining,
    losses,
    matmul,
    normalisation,
    optimizers,
    pointwise,
    reductions,
    softmax,
    views,
)

__all__ = [
    "attention",
    "batch_norm",
    "batched",
    "convolution",
    "factories",
    "host",
    "indexing",
    "joining",
    "losses",
    "matmul",
    "normalisation",
    "optimizers",
    "pointwise",
    "reductions",
    "softmax",
    "views",
]
