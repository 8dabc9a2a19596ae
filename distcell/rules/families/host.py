"""Numbers of the host: Python's own operators, and a tensor's one element as a number."""

from __future__ import annotations

import builtins
import math
import operator

from distcell.rules.families.common import define
from distcell.rules.notation import OpDef
from distcell.rules.table import register, unknown_rule

_OPERATORS = (
    "add sub mul truediv floordiv mod pow neg pos abs eq ne lt le gt ge and_ or_ xor not_ invert "
    "truth getitem"
)

for _name in _OPERATORS.split():
    register(OpDef(f"py.{_name}", unknown_rule, run=getattr(operator, _name)))
for _name in "int float bool round max min".split():
    register(OpDef(f"py.{_name}", unknown_rule, run=getattr(builtins, _name)))
for _name in "sqrt ceil floor exp log cos sin".split():
    register(OpDef(f"py.{_name}", unknown_rule, run=getattr(math, _name)))

define("_local_scalar_dense", unknown_rule)
