"""Random numbers that are the same however a tensor is split, and however many ranks there are.

A number is a function of seed, step, micro-step, cell path, how many draws the cell has made in
this call, and the element's index in the global tensor.
"""

from distcell.random.mode import RandomMode, random_mode, stream_of
from distcell.random.ops import keep_mask, uniform
from distcell.random.state import RandomState, current_state, seed

__all__ = [
    "RandomMode",
    "RandomState",
    "current_state",
    "keep_mask",
    "random_mode",
    "seed",
    "stream_of",
    "uniform",
]
