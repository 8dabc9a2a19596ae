"""All use of torch's private interface, in one place.

Each function says which part of torch it needs; `python -m distcell doctor` and the tests call
`self_test` to find out whether the installed torch still has it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, repeat
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import _rendezvous_handlers
from torch.nn.modules import module as modules
from torch.nn.utils import clip_grad
from torch.nn.utils.stateless import _reparametrize_module
from torch.optim.optimizer import _foreach_supported_types
from torch.utils import checkpoint as checkpoints
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx import Graph as FxGraph
    from torch.fx import GraphModule, Node

__all__ = [
    "PrefixStore",
    "Store",
    "TCPStore",
    "TorchDispatchMode",
    "allow_foreach",
    "arguments",
    "below_autograd",
    "checkpoint_replayed",
    "gloo_backend",
    "has_hooks",
    "may_alias",
    "nccl_backend",
    "operator_function",
    "remove_global_hook",
    "return_count",
]


def gloo_backend(store: Store, index: int, size: int, *, timeout: timedelta, loopback: bool) -> Any:
    """Returns a gloo backend that is no part of torch's default group.

    Needs `ProcessGroupGloo._Options` and its `_devices`.

    Args:
        store: A store that the members of this group alone use.
        index: The place of this rank among the members.
        size: The number of members.
        timeout: How long a collective may take.
        loopback: Whether all members are on this host.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    device = dist.ProcessGroupGloo.create_device
    options._devices = [
        device(hostname="127.0.0.1") if loopback else dist.ProcessGroupGloo.create_default_device()
    ]
    return dist.ProcessGroupGloo(store, index, size, options)


def clone_store(store: Store) -> Store:
    """Returns a second connection to the same store. Needs `Store.clone`."""
    cloned: Store = store.clone()  # type: ignore[attr-defined]
    return cloned


def nccl_backend(store: Store, index: int, size: int, *, timeout: timedelta) -> Any:
    """Returns an NCCL backend that is no part of torch's default group.

    Needs `ProcessGroupNCCL.Options` and its `_timeout`.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, index, size, options)


def remove_global_hook(handle: RemovableHandle) -> None:
    """Removes a hook on the calls of all modules, with all that torch keeps of it.

    Needs `torch.nn.modules.module._global_forward_hooks_with_kwargs`: `handle.remove` forgets it.
    """
    handle.remove()
    modules._global_forward_hooks_with_kwargs.pop(handle.id, None)


def has_hooks(module: torch.nn.Module) -> bool:
    """Returns whether calling the module runs hooks around its forward, its own or global ones.

    Needs the dicts of hooks of `torch.nn.Module` and of `torch.nn.modules.module`.

    Args:
        module: Its children's hooks do not count.
    """
    shared = torch.nn.modules.module
    return any(getattr(module, name) for name in _OWN_HOOKS) or any(
        getattr(shared, f"_global{name}") for name in _OWN_HOOKS
    )


_OWN_HOOKS = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")


@contextmanager
def without_own_hooks(module: torch.nn.Module) -> Iterator[None]:
    """A context in which calling the module runs no hooks of its own; its children's do run.

    Needs the dicts of hooks of `torch.nn.Module`.
    """
    kept = {name: module.__dict__[name] for name in _OWN_HOOKS}
    module.__dict__.update({name: OrderedDict() for name in _OWN_HOOKS})
    try:
        yield
    finally:
        module.__dict__.update(kept)


def has_global_gradient_hooks() -> bool:
    """Returns whether there are hooks on the gradients of all modules.

    Needs the dicts of hooks of `torch.nn.modules.module`.
    """
    shared = torch.nn.modules.module
    return bool(shared._global_backward_hooks or shared._global_backward_pre_hooks)


call_uncompiled: Callable[..., Any] = torch.nn.Module._call_impl
"""What calling a module does, hooks included, when `Module.compile` was not called for it."""


def call_of(otherwise: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `__call__` with fewer frames than torch's, whose two and `forward` are one here.

    What it gains pays for torch's slower ways with subclasses of Parameter. Needs the dicts of
    hooks, and `torch._C._get_tracing_state`.

    Args:
        otherwise: A function of module, arguments and keyword arguments: the call of a module that
            has the field `_special_call`.
        forward: The `forward` that does nothing but to return `self.construct` of its arguments.
    """
    before, after = modules._global_forward_pre_hooks, modules._global_forward_hooks
    backward_before, backward = modules._global_backward_pre_hooks, modules._global_backward_hooks
    tracing = torch._C._get_tracing_state  # torch.jit notes the names of modules

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 (named in tracebacks)
        # torch's `__getattr__` makes each attribute of a module slow: its dict is asked for once
        own = self.__dict__
        if "_special_call" in own or "_forward_hooks" not in own:
            return otherwise(self, args, kwargs)
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or before or after:
            return call_uncompiled(self, *args, **kwargs)
        if own["_backward_hooks"] or own["_backward_pre_hooks"] or backward_before or backward:
            return call_uncompiled(self, *args, **kwargs)
        if tracing():
            return call_uncompiled(self, *args, **kwargs)
        passes_on = "forward" not in own and type(self).forward is forward
        run = self.construct if passes_on else self.forward
        return run(*args, **kwargs) if kwargs else run(*args)

    return __call__


def init_module(module: torch.nn.Module) -> None:
    """Does what `torch.nn.Module.__init__` does, in a quarter of its time.

    It sets seventeen fields one by one. Here they are those of a module that was made at import.
    Needs its fields to be empty containers and constants.

    Args:
        module: It has no fields yet that matter.
    """
    fields = module.__dict__
    fields.update(_CONSTANTS)
    for name, kind in _CONTAINERS:
        fields[name] = kind()


_FIELDS = vars(torch.nn.Module())
_CONTAINERS = [(name, type(value)) for name, value in _FIELDS.items() if hasattr(value, "clear")]
_CONSTANTS = {name: value for name, value in _FIELDS.items() if not hasattr(value, "clear")}


def can_register(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> bool:
    """Returns whether all that torch would do to register a parameter is to put it in its dict.

    Needs the dicts of `torch.nn.Module`. False as well when somebody has replaced its method, as
    libraries do that make models without memory.

    Args:
        module: The one that is to have it.
        name: The attribute.
        parameter: The parameter.
    """
    fields = module.__dict__
    return (
        torch.nn.Module.register_parameter is _register_parameter
        and "_modules" in fields
        and name not in fields
        and name not in fields["_parameters"]
        and name not in fields["_modules"]
        and name not in fields["_buffers"]
        and not hasattr(type(module), name)
        and parameter.grad_fn is None
        and not modules._global_parameter_registration_hooks
        and name.isidentifier()
    )


_register_parameter = torch.nn.Module.register_parameter

as_subclass: Callable[..., Any] = torch.Tensor._make_subclass
"""A tensor of a class that shares the memory of a plain one: of class, tensor, `requires_grad`."""


def asked_by_parameter(caller: FrameType) -> bool:
    """Returns whether a call comes from the constructor of `torch.nn.Parameter`.

    Given a subclass of its own, that detaches and refuses what is not of the subclass. Needs
    `torch.nn.Parameter.__new__` to do so itself.

    Args:
        caller: The frame that calls.
    """
    return caller.f_code is _PARAMETER_NEW


_PARAMETER_NEW = torch.nn.Parameter.__new__.__code__


def allow_foreach(kind: type[torch.Tensor]) -> None:
    """Lets torch's optimizers and clipping use their fused loops for a class of tensors.

    Needs `torch.optim.optimizer._foreach_supported_types`, which is compared with `type(p) in`.

    Args:
        kind: A subclass that adds no behaviour to arithmetic.
    """
    if kind not in _foreach_supported_types:
        _foreach_supported_types.append(kind)


def fake_mode(*, numbers: bool = False) -> FakeTensorMode:
    """Returns the mode under which tensors have a shape and no values.

    Needs `torch._subclasses.fake_tensor`.

    Args:
        numbers: Whether `.item()` gives an unknown number; else it is an error.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(
        allow_non_fake_inputs=True, static_shapes=True, shape_env=ShapeEnv() if numbers else None
    )


@contextmanager
def without_failure_logs() -> Iterator[None]:
    """A context in which an op that fails without values raises, and is not written to a log too.

    Needs `torch._subclasses.fake_tensor.log`.
    """
    from torch._subclasses import fake_tensor

    before = fake_tensor.log.disabled
    fake_tensor.log.disabled = True
    try:
        yield
    finally:
        fake_tensor.log.disabled = before


def trace(function: Callable[..., Any], inputs: Sequence[Any]) -> GraphModule:
    """Returns the ATen ops that a function calls, as an FX graph.

    Needs `torch.fx.experimental.proxy_tensor.make_fx`, its underscored arguments, and
    `torch.fx._lazy_graph_module`.
    """
    from torch.fx._lazy_graph_module import _use_lazy_graph_module
    from torch.fx.experimental.proxy_tensor import make_fx

    tracer = make_fx(function, _allow_non_fake_inputs=True, _disable_torch_fn_metadata_mode=True)
    # no Python code is made of the graph
    with _use_lazy_graph_module(True), without_failure_logs():
        return tracer(*inputs)


def traced_graph() -> FxGraph | None:
    """Returns the graph that is being traced, if any. Needs `get_proxy_mode`."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    return None if mode is None else mode.tracer.graph


def traced_node(tensor: torch.Tensor) -> Node | None:
    """Returns the node that made a tensor in the trace that is going on. Needs `get_proxy_slot`."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def traced_number(value: float, name: str) -> tuple[float, Node]:
    """Returns a number that is an input of the trace going on, and its node; branches see `value`.

    Needs `ShapeEnv.create_symbol`, `create_symfloatnode` and `track_tensor_tree`.

    Args:
        value: What it is now.
        name: The name of the graph's placeholder.
    """
    from torch._dynamo.source import ConstantSource
    from torch._guards import detect_fake_mode
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    mode = get_proxy_mode()
    fake = detect_fake_mode()
    assert mode is not None and fake is not None and fake.shape_env is not None
    source = ConstantSource(name)
    symbol = fake.shape_env.create_symbol(
        value, source, dynamic_dim=DimDynamic.DYNAMIC, do_not_specialize_zero_one=True
    )
    number = fake.shape_env.create_symfloatnode(symbol, hint=value, source=source)
    proxy = mode.tracer.create_proxy("placeholder", name, (), {})
    track_tensor_tree(number, proxy, constant=None, tracer=mode.tracer)
    return cast(float, number), proxy.node


def number_guards(mode: FakeTensorMode) -> list[str]:
    """Returns the branches taken on numbers of a trace, except on whether one of them is 0.

    Needs `ShapeEnv.guards`.
    """
    guards = [] if mode.shape_env is None else [guard.expr for guard in mode.shape_env.guards]
    zero = ("Equality", "Unequality")  # of sympy
    return [
        str(guard)
        for guard in guards
        if type(guard).__name__ not in zero or all(side != 0 for side in guard.args)
    ]


def forward_number() -> int:
    """Returns the number of the autograd node that this thread made last.

    Needs `torch._C._autograd._get_sequence_nr`.
    """
    return torch._C._autograd._get_sequence_nr() - 1


def backward_number() -> int | None:
    """Returns the number of the autograd node that runs backward, None outside of backward.

    Needs `torch._C._current_autograd_node`.
    """
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


@contextmanager
def with_tensors(module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> Iterator[None]:
    """A context in which a module's parameters and buffers are other tensors, backward included.

    Needs `torch.nn.utils.stateless._reparametrize_module`; `torch.func.functional_call` ends
    before backward, where a module that checkpoints needs its parameters again. Recurrent layers
    keep a second list of their parameters, `_flat_weights`, and one of references to these.
    """
    recurrent = [part for part in module.modules() if isinstance(part, torch.nn.RNNBase)]
    kept = [(part._flat_weights, part._flat_weight_refs) for part in recurrent]
    # a module that has two names is met twice: what was first taken out is to go back last
    with _reparametrize_module(module, tensors, stack_weights=True):
        for part in recurrent:
            part._flat_weights = [getattr(part, name) for name in part._flat_weights_names]
        try:
            yield
        finally:
            for part, lists in zip(recurrent, kept, strict=True):
                part._flat_weights, part._flat_weight_refs = lists


@contextmanager
def checkpoint_as_call() -> Iterator[None]:
    """A context in which `torch.utils.checkpoint` calls the function, and replays nothing.

    Needs `_checkpoint_without_reentrant_generator` and `CheckpointFunction`, looked up by
    `torch.utils.checkpoint.checkpoint` as globals of its module.
    """

    class Call:
        @staticmethod
        def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
            return function(*args)

    def once(*_args: Any, **_kwargs: Any) -> Iterator[None]:
        yield

    kept = checkpoints._checkpoint_without_reentrant_generator, checkpoints.CheckpointFunction
    checkpoints._checkpoint_without_reentrant_generator = once
    checkpoints.CheckpointFunction = Call  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        checkpoints._checkpoint_without_reentrant_generator = kept[0]
        checkpoints.CheckpointFunction = kept[1]  # type: ignore[misc]


@contextmanager
def without_onednn() -> Iterator[None]:
    """A context in which no op is one of oneDNN's own; `torch.backends.mkldnn.flags` warns of tf32.

    Needs `torch._C._get_mkldnn_enabled` and `torch._C._set_mkldnn_enabled`.
    """
    kept = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(kept)


class Functional:
    """A context in which ops that write into tensors become ops that make new ones.

    Needs `torch._to_functional_tensor`, `_from_functional_tensor`, `_sync` and
    `_enable_functionalization`.
    """

    def __enter__(self) -> Functional:
        torch._enable_functionalization(reapply_views=True)
        return self

    def __exit__(self, *_error: object) -> None:
        torch._disable_functionalization()

    def wrap(self, item: Any) -> Any:
        """The tensor that stands for a traced one."""
        return torch._to_functional_tensor(item) if isinstance(item, torch.Tensor) else item

    def unwrap(self, item: Any) -> Any:
        """The traced tensor that holds the value of one that `wrap` or an op gave."""
        if not isinstance(item, torch.Tensor) or not torch._is_functional_tensor(item):
            return item
        torch._sync(item)  # type: ignore[attr-defined, no-untyped-call]
        return torch._from_functional_tensor(item)


def is_fake(tensor: object) -> bool:
    """Returns whether a tensor has no values. Needs `torch._subclasses.fake_tensor.FakeTensor`."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def needs_value(error: BaseException) -> bool:
    """Returns whether an op failed because a tensor has no values under `fake_mode`.

    Needs the exceptions of `torch._subclasses.fake_tensor` and of `symbolic_shapes`.
    """
    from torch._subclasses import fake_tensor
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    kinds = (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        GuardOnDataDependentSymNode,
    )
    return isinstance(error, kinds)


def operator_function(overload: Any) -> Any:
    """Returns what an operator overload calls, without the Python frame around it.

    Needs `OpOverload._op`.

    Args:
        overload: Such as `torch.ops.aten.mm.default`; another callable comes back as it is.
    """
    return overload._op if isinstance(overload, torch._ops.OpOverload) else overload


def may_alias(overload: Any) -> bool:
    """Returns whether a result of an operator may share the storage of an operand, or be one.

    Needs `OpOverload._schema`.

    Args:
        overload: Such as `torch.ops.aten.t.default`; of another callable nothing is known.
    """
    if not isinstance(overload, torch._ops.OpOverload):
        return True
    return any(result.alias_info is not None for result in overload._schema.returns)


def return_count(overload: Any) -> int | None:
    """Returns how many results an operator returns; None when they are a list.

    Needs `OpOverload._schema`.

    Args:
        overload: Such as `torch.ops.aten.native_layer_norm.default`.
    """
    returns = overload._schema.returns
    return len(returns) if len(returns) > 1 else None


def below_autograd() -> Any:
    """Returns a context in which operators skip autograd's layer of the dispatcher altogether.

    Needs `torch._C._AutoDispatchBelowAutograd`. Version counters still count in-place writes.
    """
    return torch._C._AutoDispatchBelowAutograd()


def arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call of an ATen operator by name, defaults included.

    Needs `OpOverload._schema`.
    """
    schema = func._schema.arguments
    named = {item.name: item.default_value for item in schema if item.has_default_value()}
    return named | {item.name: arg for item, arg in zip(schema, args, strict=False)} | {**kwargs}


def output_mask(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[bool, ...] | None:
    """Returns which of its results a call of an ATen operator asks for; None: it has no such mask.

    Needs `OpOverload._schema`.
    """
    mask = arguments(func, args, kwargs).get("output_mask")
    return None if mask is None else tuple(mask)


@contextmanager
def checkpoint_replayed(
    replay: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Iterator[None]:
    """A context in which `torch.utils.checkpoint` runs another function when it runs one again.

    Needs `_checkpoint_without_reentrant_generator` and `CheckpointFunction`, as
    `checkpoint_as_call` does; within that one, nothing runs again.

    Args:
        replay: Given a function when it is about to run first; makes what runs in backward.
    """
    kept = checkpoints._checkpoint_without_reentrant_generator, checkpoints.CheckpointFunction
    replay_checkpoints(replay)
    try:
        yield
    finally:
        checkpoints._checkpoint_without_reentrant_generator = kept[0]
        checkpoints.CheckpointFunction = kept[1]  # type: ignore[misc]


def replay_checkpoints(replay: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Makes `torch.utils.checkpoint` run another function from now on when it runs one again.

    Args:
        replay: As for `checkpoint_replayed`.
    """
    kept = checkpoints._checkpoint_without_reentrant_generator, checkpoints.CheckpointFunction

    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return kept[0](replay(function), *args, **kwargs)

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            turns = chain([function], repeat(replay(function)))

            def run(*inputs: Any) -> Any:
                return next(turns)(*inputs)

            return kept[1].apply(run, preserve, *args)

    checkpoints._checkpoint_without_reentrant_generator = generator  # type: ignore[assignment]
    checkpoints.CheckpointFunction = Reentrant  # type: ignore[misc, assignment]


@contextmanager
def without_saved_tensor_hooks() -> Iterator[bool]:
    """A context in which hooks on saved tensors (a checkpoint's, `save_on_cpu`) see none.

    Gives whether there are any. Needs `torch._C._autograd._top_saved_tensors_default_hooks`.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        yield False
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda item: item, lambda item: item):
        yield True


def plain_total_norm(*args: Any) -> torch.Tensor:
    """The norm of all gradients as torch's own function gives it."""
    return _own_total_norm(*args)


def replace_total_norm(function: Callable[..., torch.Tensor]) -> None:
    """Makes torch's clipping functions use another norm, however users have imported them."""
    clip_grad._get_total_norm = function
    vars(clip_grad)["get_total_norm"] = function
    vars(torch.nn.utils)["get_total_norm"] = function


_own_total_norm: Callable[..., torch.Tensor] = clip_grad._get_total_norm


def make_optimizers_without_compiler() -> None:
    """Lets torch's optimizers be made without loading torch's compiler, seconds on every rank.

    They load it to say that it should not look into their methods. Where it is loaded already,
    nothing is changed.

    Needs `torch._disable_dynamo`, which keeps what it calls as `__dynamo_disable`.
    """
    if "torch._dynamo" in sys.modules:
        return
    for name in ("add_param_group", "state_dict", "load_state_dict"):
        method = inspect.unwrap(getattr(torch.optim.Optimizer, name))
        if not hasattr(method, "__dynamo_disable"):
            setattr(method, "__dynamo_disable", method)


# As Any: the stubs of torch differ from what its C++ calls.
PythonProcessGroup: Any = dist.ProcessGroup
PythonWork: Any = dist.Work


def reduction_kind(op: Any) -> Any:
    """Returns the member of `ReduceOp.RedOpType` of a reduction. Needs `ReduceOp.op`."""
    return getattr(op, "op", op)


def premultiplier(op: Any) -> Any:
    """Returns what a scaled sum multiplies its operands by first. Needs `ReduceOp.factor`."""
    return op.factor


@dataclass(frozen=True)
class GroupRequest:
    """What torch says about a process group that it wants.

    Args:
        ranks: The ranks of the job that are in it, in its order; none for all.
        rank: The place of this process.
        size: How many there are.
        store: The key-value store for this group.
        timeout: How long a collective may take.
    """

    ranks: tuple[int, ...]
    rank: int
    size: int
    store: Store
    timeout: timedelta


def register_backend(name: str, create: Callable[[GroupRequest], Any]) -> None:
    """Makes torch.distributed know a backend for CPU and CUDA tensors.

    Needs the fields of `_DistributedBackendOptions`, and that a creator may return a whole
    `ProcessGroup`.
    """

    def creator(options: Any, _backend_options: Any) -> Any:
        return create(
            GroupRequest(
                tuple(options.global_ranks_in_group),
                options.group_rank,
                options.group_size,
                options.store,
                options.timeout,
            )
        )

    dist.Backend.register_backend(name, creator, extended_api=True, devices=["cpu", "cuda"])


def backend_names(group: Any) -> set[str]:
    """Returns the backends that a group was asked to have; none when torch does not know it.

    Needs `torch.distributed.distributed_c10d._world.pg_backend_config`.
    """
    config = distributed_c10d._world.pg_backend_config.get(group, "")
    return {part.split(":")[1] for part in config.split(",") if ":" in part}


def register_rendezvous(scheme: str, handler: Callable[..., Any]) -> None:
    """Makes `init_process_group(init_method="scheme://")` meet by a handler of ours.

    Needs `torch.distributed.rendezvous._rendezvous_handlers`: the public function takes no second.
    """
    _rendezvous_handlers[scheme] = handler


def env_rendezvous(url: str, **options: Any) -> Any:
    """Meets where RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say: torch's own handler."""
    return _own_env_rendezvous(url, **options)


def replace_env_rendezvous(handler: Callable[..., Any]) -> None:
    """Makes `init_process_group` without an address meet by a handler of ours.

    Needs `torch.distributed.rendezvous._rendezvous_handlers`.
    """
    _rendezvous_handlers["env"] = handler


_own_env_rendezvous: Callable[..., Any] = _rendezvous_handlers["env"]


def without_overrides() -> Any:
    """A context in which functions of torch ignore `__torch_function__` of subclasses.

    Needs `torch._C.DisableTorchFunctionSubclass`.
    """
    return torch._C.DisableTorchFunctionSubclass()


def watch_collectives(look: Callable[[Any], None]) -> None:
    """Lets a function look at each tensor that is given to a collective of torch.distributed.

    Needs `distributed_c10d._check_single_tensor` and `_check_tensor_list`, which all of them call.

    Args:
        look: Given a tensor; raises where it must not go through.
    """
    single, several = distributed_c10d._check_single_tensor, distributed_c10d._check_tensor_list

    def check_single(param: Any, param_name: str) -> None:
        look(param)
        single(param, param_name)

    def check_several(param: Any, param_name: str) -> None:
        for item in param if isinstance(param, (list, tuple)) else ():
            look(item)
        several(param, param_name)

    distributed_c10d._check_single_tensor = check_single
    distributed_c10d._check_tensor_list = check_several


def inside_ddp() -> bool:
    """Returns whether the forward of a DistributedDataParallel goes on.

    Needs `DistributedDataParallel._active_ddp_module`.
    """
    return torch.nn.parallel.DistributedDataParallel._active_ddp_module is not None


def inside_transform() -> bool:
    """Returns whether a transform of `torch.func` goes on. Needs `peek_interpreter_stack`."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_split_by_torch(module: torch.nn.Module) -> bool:
    """Returns whether torch has split a module: by `fully_shard`, or as DTensors.

    What it needs is loaded where that is so; nothing is imported for the question.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, fsdp.FSDPModule | fsdp.FullyShardedDataParallel):
        return True
    tensor = sys.modules.get("torch.distributed.tensor")
    parameters = [p for p in module._parameters.values() if p is not None]
    return tensor is not None and any(isinstance(p, tensor.DTensor) for p in parameters)


def is_compiled(module: torch.nn.Module) -> bool:
    """Returns whether calling a module goes through torch's compiler.

    Needs `Module._compiled_call_impl`, and `_orig_mod` of what `torch.compile` returns.
    """
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def replace_overflow_check(
    agree: Callable[[torch.optim.Optimizer, torch.Tensor], torch.Tensor],
) -> None:
    """Makes torch's `GradScaler` pass what it found in an optimizer's gradients through a function.

    Needs `GradScaler._unscale_grads_`, which looks at gradients for `unscale_` and for `step`, and
    returns by device a tensor that is not zero where one was infinite or no number.

    Args:
        agree: Given the optimizer and that tensor; returns the one to go on with.
    """
    kind: Any = torch.amp.GradScaler
    own = kind._unscale_grads_

    @functools.wraps(own)
    def unscale(self: Any, optimizer: torch.optim.Optimizer, *args: Any) -> Any:
        found = own(self, optimizer, *args)
        return {device: agree(optimizer, tensor) for device, tensor in found.items()}

    kind._unscale_grads_ = unscale


def with_overrides(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function in which subclasses have their `__torch_function__` again.

    Needs `torch._C._EnableTorchFunction`.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._EnableTorchFunction():
            return function(*args, **kwargs)

    return run


def plain_in_optimizers() -> None:
    """Makes `step` and `zero_grad` of torch's optimizers ignore `__torch_function__` of subclasses.

    Their code looks at single elements, a few ops for each parameter. A closure that is given to
    a step is the user's code again. Needs `Optimizer.profile_hook_step`, which torch calls once for
    each class of optimizers, when its first is made; classes it was called for before stay as they
    are, which is slower and as right.
    """
    kind: Any = torch.optim.Optimizer
    own = kind.profile_hook_step

    def profile_hook_step(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def run(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            given = [with_overrides(item) if callable(item) else item for item in args]
            named = {k: with_overrides(v) if callable(v) else v for k, v in kwargs.items()}
            with without_overrides():
                return step(self, *given, **named)

        hooked: Callable[..., Any] = own(run)
        return hooked

    zero_grad = kind.zero_grad

    @functools.wraps(zero_grad)
    def cleared(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        with without_overrides():
            zero_grad(self, set_to_none)

    kind.profile_hook_step, kind.zero_grad = staticmethod(profile_hook_step), cleared


def replace_optimizer_state(
    after_save: Callable[[torch.optim.Optimizer, dict[str, Any]], dict[str, Any]],
    before_load: Callable[[torch.optim.Optimizer, dict[str, Any]], dict[str, Any]],
) -> None:
    """Makes all of torch's optimizers pass what they save, and what they load, through functions.

    Replaces two methods of the class `torch.optim.Optimizer`: its own hooks are for single objects.
    """
    kind: Any = torch.optim.Optimizer
    save, load = kind.state_dict, kind.load_state_dict

    @functools.wraps(save)
    def state_dict(self: torch.optim.Optimizer) -> dict[str, Any]:
        return after_save(self, save(self))

    @functools.wraps(load)
    def load_state_dict(self: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        load(self, before_load(self, state_dict))

    kind.state_dict, kind.load_state_dict = state_dict, load_state_dict
