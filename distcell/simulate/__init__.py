"""The simulation of all ranks in one process. Calling this module is `distcell.testing.simulate`.

`distcell.simulate` is both this package and the function of the public API. Python gives the name
to the package as soon as any part of it is imported; so the package can be called.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # by name: the function lies in a layer above this one
        return import_module("distcell.testing").simulate(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
