"""From a module and example arguments to a graph at global shapes."""

from distcell.capture.cell import Captured, capture_call, is_capturing
from distcell.capture.guard import call_key
from distcell.capture.optimizer import hyperparameters
from distcell.capture.probe import StateMeta
from distcell.capture.step import CapturedStep, capture_step
from distcell.capture.tree import flatten, rebuild

__all__ = [
    "Captured",
    "CapturedStep",
    "StateMeta",
    "call_key",
    "capture_call",
    "capture_step",
    "flatten",
    "hyperparameters",
    "is_capturing",
    "rebuild",
]
