"""How this process was started, and the settings that MindSpore calls contexts, in one place."""

from __future__ import annotations

import torch

from distcell.errors import BackendError, UserTypeError, UserValueError, did_you_mean
from distcell.launch_options import (
    BACKENDS,
    MODES,
    LaunchOptions,
    launch,
    rank_of_process,
    set_launch,
)
from distcell.parallel_context import (
    PARALLEL_MODES,
    AutoParallelContext,
    ParallelMode,
    auto_parallel_context,
    get_auto_parallel_context,
    reset_auto_parallel_context,
    set_auto_parallel_context,
)

__all__ = [
    "BACKENDS",
    "GRAPH_MODE",
    "MODES",
    "PARALLEL_MODES",
    "PYNATIVE_MODE",
    "AutoParallelContext",
    "LaunchOptions",
    "ParallelMode",
    "auto_parallel_context",
    "get_auto_parallel_context",
    "get_context",
    "get_ps_context",
    "launch",
    "rank_of_process",
    "reset_auto_parallel_context",
    "reset_ps_context",
    "set_auto_parallel_context",
    "set_context",
    "set_launch",
    "set_ps_context",
]

GRAPH_MODE, PYNATIVE_MODE = 0, 1

_TARGETS = ("CPU", "GPU")
_DEFAULTS: dict[str, object] = {"mode": PYNATIVE_MODE, "device_target": "CPU"}
_PS_DEFAULTS: dict[str, object] = {"enable_ps": False}

_settings = dict(_DEFAULTS)
_ps_settings = dict(_PS_DEFAULTS)


def set_context(**settings: object) -> None:
    """Changes settings of MindSpore's context that have a meaning here.

    Args:
        settings: `mode`: `GRAPH_MODE` or `PYNATIVE_MODE`, which give the same values: a parallel
            Cell is captured in both, another one in neither. `device_target`: `CPU` or `GPU`,
            which must be there; tensors lie where torch puts them.

    Raises:
        UserValueError: a key or a value is not known. Nothing is changed then.
        UserTypeError: a value has the wrong type. Nothing is changed then.
        BackendError: there is no such device. Nothing is changed then.

    >>> set_context(mode=PYNATIVE_MODE)
    >>> get_context("mode") == PYNATIVE_MODE
    True
    """
    for key, value in settings.items():
        _check_key(key, _DEFAULTS, "the context")
        if key == "mode":
            if type(value) is not int:
                raise UserTypeError(f"`mode` is {value!r}", hint="GRAPH_MODE or PYNATIVE_MODE")
            if value not in (GRAPH_MODE, PYNATIVE_MODE):
                raise UserValueError(f"no mode {value}", hint="GRAPH_MODE or PYNATIVE_MODE")
        else:
            _check_target(value)
    _settings.update(settings)


def get_context(key: str) -> object:
    """Returns one setting of the context.

    Args:
        key: `mode` or `device_target`.

    Raises:
        UserValueError: the key is not known.

    >>> get_context("device_target")
    'CPU'
    """
    _check_key(key, _DEFAULTS, "the context")
    return _settings[key]


def set_ps_context(**settings: object) -> None:
    """Changes settings of the parameter server.

    Args:
        settings: `enable_ps`: whether the job uses one.

    Raises:
        UserValueError: a key is not known.
        UserTypeError: a value has the wrong type.

    >>> set_ps_context(enable_ps=True)
    >>> get_ps_context("enable_ps")
    True
    >>> reset_ps_context()
    """
    for key, value in settings.items():
        _check_key(key, _PS_DEFAULTS, "the parameter server's context")
        if not isinstance(value, bool):
            raise UserTypeError(f"`{key}` is {value!r}, not a bool")
    _ps_settings.update(settings)


def get_ps_context(key: str) -> object:
    """Returns one setting of the parameter server.

    Args:
        key: `enable_ps`.

    Raises:
        UserValueError: the key is not known.

    >>> get_ps_context("enable_ps")
    False
    """
    _check_key(key, _PS_DEFAULTS, "the parameter server's context")
    return _ps_settings[key]


def reset_ps_context() -> None:
    """Gives the settings of the parameter server their defaults again.

    >>> reset_ps_context()
    """
    _ps_settings.update(_PS_DEFAULTS)


def _check_key(key: str, known: dict[str, object], what: str) -> None:
    if key not in known:
        raise UserValueError(f"{what} has no key `{key}`", hint=did_you_mean(key, known))


def _check_target(value: object) -> None:
    if not isinstance(value, str):
        raise UserTypeError(f"`device_target` is {value!r}, not a str")
    if value == "Ascend":
        raise BackendError("torch has no Ascend device here", hint="use `CPU` or `GPU`")
    if value not in _TARGETS:
        hint = did_you_mean(value, _TARGETS)
        raise UserValueError(f"no device `{value}`", hint=hint)
    if value == "GPU" and not torch.cuda.is_available():
        raise BackendError("torch finds no GPU", hint="use `CPU`")
