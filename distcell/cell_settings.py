"""Settings of a Cell that other parts act on: recomputation, fusion, stages, servers, strategy.

They are checked and kept here, and read where they act.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch

from distcell.cell_base import CellBase, check_bool, refresh_names
from distcell.context import auto_parallel_context, get_ps_context, rank_of_process
from distcell.errors import (
    SettingError,
    UserTypeError,
    UserValueError,
    did_you_mean,
)
from distcell.parameter import Parameter, adopt


@dataclass(frozen=True)
class Recompute:
    """What `Cell.recompute` was told.

    Args:
        mp_comm_recompute: whether collectives that the strategy brings into the cell run again.
        parallel_optimizer_comm_recompute: whether parameters that the optimizer splits are gathered
            again in backward.

    >>> Recompute().mp_comm_recompute
    True
    """

    mp_comm_recompute: bool = True
    parallel_optimizer_comm_recompute: bool = False


class CellSettings(CellBase):
    """What is noted for the passes, the pipeline, the servers and the search."""

    _recompute: Recompute | None = None
    _pipeline_stage: int | None = None
    _data_parallel: bool = False

    def recompute(self, **kwargs: bool) -> None:
        """Lets backward compute what is inside the cell again, instead of keeping it.

        What leaves the cell is kept. It can be said once: of a cell, or of one that holds it.

        Args:
            kwargs: `mp_comm_recompute` (True) and `parallel_optimizer_comm_recompute` (False): see
                `Recompute`. All are checked before any takes effect.

        Raises:
            UserValueError: another argument is given.
            UserTypeError: one is no bool.
            SettingError: it was said already of this cell or of one below it.

        >>> cell = CellSettings()
        >>> cell.recompute(mp_comm_recompute=False)
        >>> cell.recompute_setting
        Recompute(mp_comm_recompute=False, parallel_optimizer_comm_recompute=False)
        """
        known = ("mp_comm_recompute", "parallel_optimizer_comm_recompute")
        for key, value in kwargs.items():
            if key not in known:
                hint = did_you_mean(key, known)
                raise UserValueError(f"`recompute` has no argument `{key}`", hint=hint)
            check_bool(key, value)
        for path, module in torch.nn.Module.named_modules(self):
            if isinstance(module, CellSettings) and module._recompute is not None:
                who = f"the cell `{path}` below it" if path else "this cell"
                raise SettingError(
                    f"`recompute` was said of {who} already", hint="say it once, of the outer cell"
                )
        self._recompute = Recompute(**kwargs)
        if self._recompute.parallel_optimizer_comm_recompute:
            for param in _trainable(self):
                param.parallel_optimizer_comm_recompute = True

    @property
    def recompute_setting(self) -> Recompute | None:
        """What `recompute` was told; None when it was not called."""
        return self._recompute

    def set_comm_fusion(self, fusion_type: int, recurse: bool = True) -> Self:
        """Returns this cell; gradients of its parameters are reduced with those of the same number.

        The last call wins, also one for an outer cell over one for an inner.

        Args:
            fusion_type: the number; 0: each by itself.
            recurse: whether parameters of children too.

        Raises:
            UserTypeError: it is no int.
            UserValueError: it is negative.

        >>> cell = CellSettings()
        >>> cell.scale = Parameter(torch.zeros(1))
        >>> cell.set_comm_fusion(2).scale.comm_fusion
        2
        """
        check_bool("recurse", recurse)
        if isinstance(fusion_type, bool) or not isinstance(fusion_type, int):
            raise UserTypeError(f"`fusion_type` is {fusion_type!r}, not an int")
        if fusion_type < 0:
            raise UserValueError(f"`fusion_type` is {fusion_type}; it is at least 0")
        for param in _trainable(self, recurse):
            param.comm_fusion = fusion_type
        return self

    def set_param_ps(self, recurse: bool = True, init_in_server: bool = False) -> None:
        """Lets a parameter server update the trainable parameters.

        Args:
            recurse: whether those of children too.
            init_in_server: whether their first values are made there.

        Raises:
            SettingError: the job does not use a parameter server.

        >>> from distcell.context import reset_ps_context, set_ps_context
        >>> set_ps_context(enable_ps=True)
        >>> cell = CellSettings()
        >>> cell.scale = Parameter(torch.zeros(1))
        >>> cell.set_param_ps(init_in_server=True)
        >>> cell.scale.is_param_ps, cell.scale.init_in_server
        (True, True)
        >>> reset_ps_context()
        """
        check_bool("recurse", recurse)
        check_bool("init_in_server", init_in_server)
        if not get_ps_context("enable_ps"):
            raise SettingError(
                "the job does not use a parameter server",
                hint="call `set_ps_context(enable_ps=True)` before",
            )
        for param in _trainable(self, recurse):
            param.set_param_ps(init_in_server)

    def set_param_fl(
        self,
        push_to_server: bool = False,
        pull_from_server: bool = False,
        requires_aggr: bool = True,
    ) -> None:
        """Says what a federated server does with all parameters, trained or not.

        Each call sets all three; MindSpore's never sets one back.

        Args:
            push_to_server: whether clients send them.
            pull_from_server: whether clients take them.
            requires_aggr: whether the server aggregates them.

        Raises:
            UserTypeError: one is no bool.

        >>> cell = CellSettings()
        >>> cell.scale = Parameter(torch.zeros(1))
        >>> cell.set_param_fl(push_to_server=True)
        >>> cell.scale.push_weight_to_server
        True
        """
        check_bool("push_to_server", push_to_server)
        check_bool("pull_from_server", pull_from_server)
        check_bool("requires_aggr", requires_aggr)
        for param in _ours(self, torch.nn.Module.parameters(self)):
            param.push_weight_to_server = push_to_server
            param.pull_weight_from_server = pull_from_server
            param.requires_aggr = requires_aggr

    @property
    def pipeline_stage(self) -> int | None:
        """The stage of the pipeline that the cell belongs to; None when none was assigned.

        Assigning also notes it with all trainable parameters of the cell.

        Raises:
            UserTypeError: what is assigned is no int.
            UserValueError: it is negative.
        """
        return self._pipeline_stage

    @pipeline_stage.setter
    def pipeline_stage(self, stage: int) -> None:
        if isinstance(stage, bool) or not isinstance(stage, int):
            raise UserTypeError(f"`pipeline_stage` is {stage!r}, not an int")
        if stage < 0:
            raise UserValueError(f"`pipeline_stage` is {stage}; stages are counted from 0")
        self._pipeline_stage = stage
        for param in _trainable(self):
            param.add_pipeline_stage(stage)

    def infer_param_pipeline_stage(self) -> list[torch.nn.Parameter]:
        """Returns the trainable parameters of this process's stage of the pipeline.

        Ranks form stages in order: with `pipeline_stages=2`, the first half is stage 0.

        Raises:
            SettingError: a parameter belongs to no stage: it names all of them; or the ranks do
                not divide among the stages.

        >>> cell = CellSettings()
        >>> cell.scale = Parameter(torch.zeros(1))
        >>> cell.pipeline_stage = 0
        >>> len(cell.infer_param_pipeline_stage())
        1
        """
        stages = auto_parallel_context().pipeline_stages
        rank, ranks = rank_of_process()
        if ranks % stages:
            raise SettingError(f"{ranks} ranks do not divide among {stages} stages")
        current = rank // (ranks // stages)
        params = list(_trainable(self))
        lost = [param.name for param in params if not param.pipeline_stages]
        if lost:
            raise SettingError(
                f"parameter `{lost[0]}` belongs to no stage of the pipeline",
                where=[f"all that belong to none: {', '.join(lost)}"],
                hint="set `pipeline_stage` of its cell, or call its `add_pipeline_stage`",
            )
        return [param for param in params if current in param.pipeline_stages]

    def set_data_parallel(self) -> None:
        """Notes that a search is to split nothing in this cell but the batch.

        What `shard` or a strategy file says of the cell comes first. Only a search reads it:
        without one nothing is split that was not asked for.

        >>> cell = CellSettings()
        >>> cell.set_data_parallel()
        >>> cell.is_data_parallel
        True
        """
        for module in torch.nn.Module.modules(self):
            if isinstance(module, CellSettings):
                module._data_parallel = True

    @property
    def is_data_parallel(self) -> bool:
        """Whether `set_data_parallel` was called, of this cell or one that holds it."""
        return self._data_parallel


def _trainable(cell: torch.nn.Module, recurse: bool = True) -> Iterable[Parameter]:
    params = torch.nn.Module.parameters(cell, recurse)
    return _ours(cell, (param for param in params if param.requires_grad))


def _ours(cell: torch.nn.Module, params: Iterable[Any]) -> Iterable[Parameter]:
    """The parameters, which can take settings then."""
    refresh_names(cell)
    for param in params:
        adopt(param)  # a wrapper with `auto_prefix=False` leaves its children's as they are
        if not isinstance(param, Parameter):
            kind = type(param).__name__
            raise UserTypeError(f"a parameter of type {kind} cannot take the setting")
        yield param
