"""From a module and example arguments to a graph at global shapes."""

from distcell.capture.cell import Captured, capture_call, is_capturing
from distcell.capture.tree import flatten, rebuild

__all__ = ["Captured", "capture_call", "flatten", "is_capturing", "rebuild"]
