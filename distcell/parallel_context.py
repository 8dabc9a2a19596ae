"""The settings that MindSpore calls the auto-parallel context: those that have a meaning here.

They are process-wide. The script may set them; the engine reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from distcell.errors import (
    NotFoundError,
    StrategyError,
    UserTypeError,
    did_you_mean,
)
from distcell.launch_options import rank_of_process


class ParallelMode:
    """MindSpore's names of the parallel modes.

    >>> ParallelMode.SEMI_AUTO_PARALLEL
    'semi_auto_parallel'
    """

    STAND_ALONE = "stand_alone"
    DATA_PARALLEL = "data_parallel"
    HYBRID_PARALLEL = "hybrid_parallel"
    SEMI_AUTO_PARALLEL = "semi_auto_parallel"
    AUTO_PARALLEL = "auto_parallel"


PARALLEL_MODES = ("stand_alone", "data_parallel", "semi_auto_parallel", "auto_parallel")
SEARCH_MODES = ("sharding_propagation",)
FUSED = ("allreduce", "allgather", "reducescatter")
FUSION_MODES = ("auto", "size", "index")


@dataclass(frozen=True)
class AutoParallelContext:
    """The settings of `set_auto_parallel_context`.

    Args:
        parallel_mode: `semi_auto_parallel`: the strategy file and the cells' own `shard` calls
            decide. `auto_parallel`: the same, by the `search_mode`. `data_parallel`: the `data`
            strategy, whatever the launcher says. `stand_alone`: every rank runs the whole model,
            uncaptured.
        gradients_mean: True: gradients are those of one device. False multiplies those of
            parameters by the parts that the strategy's `inputs:` split the batch into, as
            MindSpore's sum does; a strategy that splits none is refused then.
        strategy: name or path of the strategy file; the launcher's `--strategy` when left out.
        full_batch: True: every rank passes the same global batch. False: each passes its part.
            MindSpore's `dataset_strategy` sets it too: `full_batch` or `data_parallel`.
        search_mode: of `auto_parallel`: `sharding_propagation` derives from what is annotated.
        pipeline_stages: among how many stages the ranks are divided: what
            `Cell.infer_param_pipeline_stage` goes by. A call of a parallel network is refused with
            more than 1.
        comm_fusion: how gradients are exchanged together, as in MindSpore: for `allreduce` a `mode`
            (`auto`, or `size`) and a `config` (None, or the most MiB of one message; 0: each by
            itself); `openstate` False exchanges each by itself. By `index` nothing is fused here,
            and no gathers are: such settings are refused.
    """

    parallel_mode: str = "semi_auto_parallel"
    gradients_mean: bool = True
    strategy: str | None = None
    full_batch: bool = True
    search_mode: str = "sharding_propagation"
    pipeline_stages: int = 1
    comm_fusion: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def fused_bytes(self) -> int | None:
        """What one message of gradients holds at most; 0: one gradient; None: the default."""
        if not self.comm_fusion.get("openstate", True):
            return 0
        size: int | None = self.comm_fusion.get("allreduce", {}).get("config")
        return None if size is None else size << 20


_ALIASES = {"auto_parallel_search_mode": "search_mode"}
_READ_ONLY = ("device_num", "global_rank")
_FILE = "use `strategy=` with the path of a strategy file"
_OPTIMIZER = "what an optimizer holds is split as its parameter is: split the parameter"
_PRINTS = "leave it out; `python -m distcell plan` prints what was decided"
_MINDSPORE_KEYS = {
    "device_num": "the number of ranks is the launcher's: `-n 8`",
    "global_rank": "the launcher gives every rank its number",
    "sharding_propagation": "use `search_mode='sharding_propagation'`",
    "parameter_broadcast": "leave it out: ranks start with equal parameters, which is checked",
    "strategy_ckpt_load_file": _FILE,
    "strategy_ckpt_config": _FILE,
    "strategy_ckpt_save_file": _PRINTS,
    "group_ckpt_save_file": _PRINTS,
    "loss_repeated_mean": "leave it out: gradients are those of one device",
    "gradient_fp32_sync": "leave it out: gradients are exchanged in their own type",
    "force_fp32_communication": "leave it out: tensors are exchanged in their own type",
    "enable_parallel_optimizer": _OPTIMIZER,
    "parallel_optimizer_config": _OPTIMIZER,
    "optimizer_weight_shard_size": _OPTIMIZER,
    "optimizer_weight_shard_aggregated_save": "leave it out: `state_dict()` is of global values",
    "all_reduce_fusion_config": "use `comm_fusion=` with mode `size`",
    "communi_parallel_mode": "leave it out: it hints at streams that only Ascend has",
    "enable_alltoall": "leave it out: a change of layout takes the cheapest collective",
    "pipeline_config": "leave it out: the schedule of a pipeline is no setting of the process",
    "pipeline_result_broadcast": "leave it out: outputs are global values on every rank",
    "auto_pipeline": "set `pipeline_stage` of some cells",
    "grad_accumulation_step": "call `optimizer.step()` after several backwards, as in torch",
    "dump_local_norm": "leave it out, and use a hook",
    "dump_local_norm_path": "leave it out, and use a hook",
    "dump_device_local_norm": "leave it out, and use a hook",
    "init_param_in_compile": "use `dc.lazy_init()`",
}

_context = AutoParallelContext()


def set_auto_parallel_context(**settings: object) -> None:
    """Changes settings of the auto-parallel context; the others stay as they are.

    Args:
        settings: fields of `AutoParallelContext`, and `dataset_strategy`.

    Raises:
        StrategyError: a key or a value is not known. Nothing is changed then.
        UserTypeError: a value has the wrong type. Nothing is changed then.
        NotFoundError: `comm_fusion` has an unknown key, or lacks one. Nothing is changed then.

    >>> set_auto_parallel_context(parallel_mode="data_parallel")
    >>> get_auto_parallel_context("parallel_mode")
    'data_parallel'
    >>> reset_auto_parallel_context()
    """
    global _context  # noqa: PLW0603 (process-wide, as in MindSpore)
    checked: dict[str, Any] = {}
    for given, value in settings.items():
        key = _ALIASES.get(given, given)
        if key == "dataset_strategy":
            key, value = "full_batch", _full_batch(value)
        if key not in _CHECKS:
            hint = _MINDSPORE_KEYS.get(key) or did_you_mean(key, _CHECKS)
            raise StrategyError(f"the auto-parallel context has no key `{key}`", hint=hint)
        _CHECKS[key](key, value)
        checked[key] = value
    _context = replace(_context, **checked)


def get_auto_parallel_context(key: str) -> object:
    """Returns one setting of the auto-parallel context.

    Args:
        key: a field of `AutoParallelContext`, `dataset_strategy`, or one that the launcher sets:
            `device_num` (the ranks) and `global_rank`.

    Raises:
        StrategyError: the key is not known.

    >>> get_auto_parallel_context("gradients_mean"), get_auto_parallel_context("device_num")
    (True, 1)
    """
    key = _ALIASES.get(key, key)
    if key in _READ_ONLY:
        return rank_of_process()[key == "device_num"]
    if key == "dataset_strategy":
        return "full_batch" if _context.full_batch else "data_parallel"
    known = [each.name for each in fields(AutoParallelContext)]
    if key not in known:
        hint = _MINDSPORE_KEYS.get(key) or did_you_mean(key, known)
        raise StrategyError(f"the auto-parallel context has no key `{key}`", hint=hint)
    value: object = getattr(_context, key)
    return value


def auto_parallel_context() -> AutoParallelContext:
    """Returns all settings at once.

    >>> auto_parallel_context().full_batch
    True
    """
    return _context


def reset_auto_parallel_context() -> None:
    """Gives every setting its default again.

    >>> reset_auto_parallel_context()
    """
    global _context  # noqa: PLW0603 (process-wide, as in MindSpore)
    _context = AutoParallelContext()


# - Checks


def _has_type(*kinds: type) -> Callable[[str, object], None]:
    names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)

    def check(key: str, value: object) -> None:
        if type(value) not in kinds:
            raise UserTypeError(f"`{key}` is {value!r}, a {type(value).__name__}; it takes {names}")

    return check


def _check_mode(key: str, value: object) -> None:
    _has_type(str)(key, value)
    if value == ParallelMode.HYBRID_PARALLEL:
        raise StrategyError(
            "`hybrid_parallel` is not a mode here: there networks exchange data themselves",
            hint="use `stand_alone` with `torch.distributed`, or `semi_auto_parallel`",
        )
    if value not in PARALLEL_MODES:
        hint = did_you_mean(str(value), PARALLEL_MODES)
        raise StrategyError(f"no parallel mode `{value}`", hint=hint)


def _check_search(key: str, value: object) -> None:
    _has_type(str)(key, value)
    if value in ("dynamic_programming", "recursive_programming"):
        raise StrategyError(
            f"`search_mode='{value}'` is not built",
            hint="use `sharding_propagation`, and annotate what is to be split",
        )
    if value not in SEARCH_MODES:
        raise StrategyError(
            f"no search mode `{value}`", hint=did_you_mean(str(value), SEARCH_MODES)
        )


def _check_stages(key: str, value: object) -> None:
    _has_type(int)(key, value)
    if isinstance(value, int) and value < 1:
        raise StrategyError(f"`{key}` is {value}; there is at least 1 stage")


def _check_fusion(key: str, value: object) -> None:
    _has_type(dict)(key, value)
    assert isinstance(value, dict)
    for name, setting in value.items():
        if name == "openstate":
            _has_type(bool)(f"{key}['openstate']", setting)
        elif name not in FUSED:
            hint = did_you_mean(str(name), ("openstate", *FUSED))
            raise NotFoundError(f"`{key}` has no key `{name}`", hint=hint)
        else:
            _check_fused(f"{key}['{name}']", setting)
            _refuse_fused(name, setting["mode"])


def _refuse_fused(name: str, mode: str) -> None:
    if name != "allreduce":
        raise StrategyError(
            f"`comm_fusion` of `{name}` has no meaning here: parameters are not gathered ahead",
            hint="leave it out; `allreduce` says how gradients are exchanged",
        )
    if mode == "index":
        raise StrategyError(
            "`comm_fusion` by `index` has no meaning here: gradients have no fixed numbers",
            hint="use mode `size` with the most MiB of one message",
        )


def _check_fused(what: str, setting: object) -> None:
    _has_type(dict)(what, setting)
    assert isinstance(setting, dict)
    for needed in ("mode", "config"):
        if needed not in setting:
            raise NotFoundError(f"`{what}` has no `{needed}`", hint="it has `mode` and `config`")
    mode, config = setting["mode"], setting["config"]
    if mode not in FUSION_MODES:
        hint = did_you_mean(str(mode), FUSION_MODES)
        raise NotFoundError(f"`{what}` has no mode `{mode}`", hint=hint)
    if mode == "auto" and config is not None:
        raise UserTypeError(f"the config of `{what}` is {config!r}; with mode `auto` it is None")
    if mode == "size":
        if isinstance(config, bool) or not isinstance(config, int):
            raise UserTypeError(f"the size of `{what}` is {config!r}, not a number of MiB")
        if config < 0:
            raise StrategyError(f"the size of `{what}` is {config}; it is at least 0")
    if mode == "index" and not (
        isinstance(config, list)
        and config
        and all(type(number) is int for number in config)
        and config == sorted(set(config))
    ):
        raise UserTypeError(f"the config of `{what}` is {config!r}, not ascending numbers")


def _full_batch(value: object) -> bool:
    if isinstance(value, tuple):
        raise StrategyError(
            "`dataset_strategy` as tuples has no meaning here: which axes split an input is said "
            "by its name",
            hint="use `inputs:` of a strategy file, or `Cell.shard`",
        )
    _has_type(str)("dataset_strategy", value)
    if value not in ("full_batch", "data_parallel"):
        hint = did_you_mean(str(value), ("full_batch", "data_parallel"))
        raise StrategyError(f"no dataset strategy `{value}`", hint=hint)
    return value == "full_batch"


_CHECKS: Mapping[str, Callable[[str, object], None]] = {
    "parallel_mode": _check_mode,
    "gradients_mean": _has_type(bool),
    "strategy": _has_type(str, type(None)),
    "full_batch": _has_type(bool),
    "search_mode": _check_search,
    "pipeline_stages": _check_stages,
    "comm_fusion": _check_fusion,
}
