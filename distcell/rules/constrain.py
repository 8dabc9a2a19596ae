"""The op that stands where the user annotated the border of a Cell.

It passes its operand on. Its result has the layout that was asked for, so that the reshard, if one
is needed, happens there and the uses on the other side see the annotated layout.
"""

from __future__ import annotations

from typing import Any

from distcell.rules.notation import OpDef, rule
from distcell.rules.table import register

CONSTRAIN = "distcell.constrain"


def _pass_on(x: Any) -> Any:
    return x


register(OpDef(CONSTRAIN, rule("* -> *", linear=[{0}], monotone=True, priority=0), run=_pass_on))
