"""Captures one call of a module: forward, and backward from the gradients of its outputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from distcell import compat
from distcell.capture import trace
from distcell.capture.arguments import argument_names, check_arguments, check_result, named
from distcell.capture.convert import Sink, to_graph
from distcell.capture.rewrites import writes
from distcell.capture.source import averages_forever, failed_at, lacks_values, value_error
from distcell.capture.strides import check_strides
from distcell.capture.tree import Spec, flatten, rebuild
from distcell.capture.watch import Watch, unchanged
from distcell.errors import CaptureError
from distcell.graph import GRADIENTS, Graph
from distcell.random import random_mode
from distcell.scope import track

_capturing: ContextVar[bool] = ContextVar("capturing", default=False)


def is_capturing() -> bool:
    """Whether a call is being captured now: modules must then run as on one device."""
    return _capturing.get()


@dataclass(frozen=True)
class Captured:
    """One call of a module as data.

    Args:
        graph: The ops of forward and backward.
        constants: The tensors that the code made or found, by the path of their input.
        output_spec: What the call returned: `rebuild(output_spec, outputs)` with the values of the
            outputs of kind `output` in order.
        tied: For each further path of a parameter or buffer the path that it goes by.
        differentiable: The numbers of the outputs that gradients can come in for.
    """

    graph: Graph
    constants: Mapping[str, Tensor]
    output_spec: Spec
    tied: Mapping[str, str] = field(default_factory=dict)
    differentiable: tuple[int, ...] = ()

    def result(self, outputs: Sequence[Any]) -> Any:
        """What the call returns, given the values of its outputs."""
        return rebuild(self.output_spec, outputs)

    @property
    def with_gradients(self) -> tuple[str, ...]:
        """The paths of the parameters and inputs that get a gradient."""
        return tuple(o.path for o in self.graph.outputs if o.kind in GRADIENTS)


def capture_call(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    grad: bool = True,
    gradients_present: Sequence[bool] | None = None,
    own_hooks: bool = True,
) -> Captured:
    """The ops of `module(*args, **kwargs)` and of its backward, at global shapes.

    Nothing is computed: only shapes and dtypes of the tensors matter. The module is not changed.

    Args:
        module: The module; forward hooks within it are part of the call.
        args: Positional arguments; tensors in containers are found.
        kwargs: Keyword arguments.
        shapes: Global shapes of parameters and buffers by path, where the module holds slices.
        grad: Whether backward is captured too, if anything needs it.
        gradients_present: For each differentiable output whether a gradient comes in for it.
        own_hooks: Whether the module's own hooks are part of the call; else who runs the graph runs
            them around it.

    Raises:
        CaptureError: When the call depends on a tensor's value, changes an attribute, or does
            something else that a graph cannot say.

    Example:
        >>> captured = capture_call(nn.Linear(3, 2), (torch.ones(4, 3),), {}, grad=False)
        >>> [op.target for op in captured.graph.ops]
        ['aten.t.default', 'aten.addmm.default']
    """
    names = argument_names(module, len(args))
    job = Job(module, module, shapes=shapes or {}, grad=grad, present=gradients_present)
    with nullcontext() if own_hooks else compat.without_own_hooks(module):
        return capture(job, names, args, kwargs)


@dataclass(frozen=True)
class Job:
    """What to capture.

    Args:
        module: The module whose parameters and buffers are the graph's.
        function: What is called with the arguments.
        shapes: Global shapes where the module holds slices.
        grad: Whether gradients are computed.
        present: Which differentiable outputs have one; None for all.
        from_loss: Whether the gradients are those of the first output, a scalar.
    """

    module: nn.Module
    function: Callable[..., Any]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    grad: bool = True
    present: Sequence[bool] | None = None
    from_loss: bool = False


def capture(
    job: Job, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Captured:
    """The ops of `job.function(*args, **kwargs)`; `names` are those of the positional arguments."""
    given = named(names, args, kwargs)
    check_arguments(given)
    if job.grad and torch.is_grad_enabled():
        _refuse_gradient_hooks(job.module)
    captured, watch = _capture_once(job, given, len(args))
    if watch.settling is None:
        return captured
    # a configuration was changed: that is fine where a second call does the same without a change
    try:
        again, watch_again = _capture_once(job, given, len(args))
        if watch_again.settling or again.graph.digest != captured.graph.digest:
            raise watch.settling
    except BaseException:
        watch.restore()
        raise
    return captured


def _capture_once(job: Job, given: Mapping[str, Any], count: int) -> tuple[Captured, Watch]:
    """One trace, and what the call changed."""
    spec, leaves = flatten(given)
    with _unwritten(job.module), _ready(job.grad), compat.fake_mode():
        body = _Body(job, spec, leaves, count)
        traced = trace.run_trace(body, body.fakes, body.recorder)
        check_strides(traced, (*leaves.values(), *job.module.parameters(), *job.module.buffers()))
        if any(writes(node.target, node.args) for node in traced.module.graph.nodes):
            traced = trace.functional(traced, body.fakes)
    graph, constants = to_graph(
        traced, body.inputs, body.sinks(traced), list(_plain_tensors(job.module))
    )
    captured = Captured(graph, constants, body.output_spec, body.tied, body.differentiable)
    return captured, body.watch


def _refuse_gradient_hooks(module: nn.Module) -> None:
    for path, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise CaptureError(
                f"{f'cell `{path}`' if path else 'the network'} has a hook on its gradients",
                where=["it would run once, when the step is captured, and never with values"],
                hint="take it off that cell: to look at gradients, read `.grad` after backward; to "
                "change\nthem, use `register_hook` of parameters, or a hook on the outermost cell, "
                "in a loop of your own",
            )
    if compat.has_global_gradient_hooks():
        raise CaptureError(
            "there is a hook on the gradients of all modules",
            where=["it would run once, when the step is captured, and never with values"],
            hint="take it away, and hook the outermost cell in a loop of your own",
        )


@contextmanager
def _unwritten(module: nn.Module) -> Iterator[None]:
    """A context after which plain tensors in attributes are as before when it fails."""
    plain = [(tensor, tensor.detach().clone()) for _, tensor in _plain_tensors(module)]
    versions = [None if tensor.is_inference() else tensor._version for tensor, _ in plain]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for (tensor, copy), version in zip(plain, versions, strict=True):
                if version is not None and tensor._version != version:
                    tensor.copy_(copy)
        raise


@contextmanager
def _ready(grad: bool) -> Iterator[None]:
    """The state of torch in which a call is traced."""
    grad = grad and torch.is_grad_enabled()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(compat.checkpoint_as_call())
        # With oneDNN, recurrent layers would be one op each, which only that library knows.
        stack.enter_context(compat.without_onednn())
        torch.clear_autocast_cache()  # else a cast weight without values would stay in it
        stack.callback(torch.clear_autocast_cache)
        token = _capturing.set(True)
        stack.callback(lambda: _capturing.reset(token))
        yield


class _Body:
    """The function that is traced, and what came of it."""

    def __init__(self, job: Job, spec: Spec, leaves: Mapping[str, Tensor], count: int) -> None:
        self.job, self.spec, self.count = job, spec, count
        self.recorder = trace.Recorder()
        self.inputs: list[tuple[str, str]] = []
        self.fakes: list[Tensor] = []
        self.tied: dict[str, str] = {}
        self.names: dict[str, int] = {}  # of parameters and buffers, aliases too: their input
        self.output_spec: Spec = None
        self.watch: Watch
        self.differentiable: tuple[int, ...] = ()
        self.results: list[tuple[str, str]] = []
        self._add_state()
        first = len(self.fakes)
        for path, tensor in leaves.items():
            self._add("input", path, tensor, tuple(tensor.shape))
        self.arguments = range(first, len(self.fakes))
        self.fakes.append(torch.empty(3, dtype=torch.int64, device=self._device()))
        self.inputs.append(("random", "key"))

    def _add_state(self) -> None:
        module, seen = self.job.module, dict[int, str]()
        for kind, found in (
            ("param", module.named_parameters(remove_duplicate=False)),
            ("buffer", module.named_buffers(remove_duplicate=False)),
        ):
            for path, tensor in found:
                if id(tensor) in seen:
                    self.tied[path] = seen[id(tensor)]
                    self.names[path] = self.names[seen[id(tensor)]]
                    continue
                seen[id(tensor)] = path
                self.names[path] = len(self.fakes)
                self._add(kind, path, tensor, self.job.shapes.get(path, tuple(tensor.shape)))

    def _add(self, kind: str, path: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        device = "cpu" if tensor.device.type == "meta" else tensor.device
        self.fakes.append(
            torch.empty(
                shape,
                dtype=tensor.dtype,
                device=device,
                requires_grad=tensor.requires_grad and self.job.grad,
            )
        )
        self.inputs.append((kind, path))

    def _device(self) -> torch.device:
        return next((fake.device for fake in self.fakes), torch.device("cpu"))

    def __call__(self, *fakes: Tensor) -> list[Any]:
        """Runs forward and backward; what it returns is described by `results`."""
        job, recorder = self.job, self.recorder
        state = {path: fakes[index] for path, index in self.names.items()}
        items = list(rebuild(self.spec, [fakes[i] for i in self.arguments]).items())
        args = [item for _, item in items[: self.count]]
        kwargs = dict(items[self.count :])
        watched = unchanged(job.module, [job.function])
        with watched as self.watch, compat.with_tensors(job.module, state):

            def leave(cell: str, kwargs: Mapping[str, Any], result: Any) -> None:
                self.watch.check_random()
                recorder.leave(cell, kwargs, result)

            with recorder, track(job.module, enter=recorder.enter, leave=leave):
                with random_mode(fakes[-1]):
                    result = _explained(job.module, job.function, args, kwargs)
                self.output_spec, leaves = flatten(result)
                check_result(self.output_spec)
                outputs = list(leaves.values())
                self.results += [("output", str(number)) for number in range(len(outputs))]
                self._check_parameters(state)
                replaced = self._replaced(state)
                grads = self._gradients(outputs, fakes)
        self.results += [("buffer", path) for path in replaced] + list(grads)
        return [*outputs, *replaced.values(), *grads.values()]

    def _check_parameters(self, state: Mapping[str, Tensor]) -> None:
        """Raises when a parameter is another one after the call, which a graph would not say."""
        now = dict(self.job.module.named_parameters(remove_duplicate=False))
        kinds = {path: self.inputs[index][0] for path, index in self.names.items()}
        for path, kind in kinds.items():
            if kind == "param" and now.get(path) is not state[path]:
                raise CaptureError(
                    f"the call replaces the parameter `{path}`",
                    where=["a captured step would not do that again"],
                    hint="compute with another tensor, or write into the parameter before the call",
                )

    def _replaced(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The buffers that are another tensor after the call."""
        now = dict(self.job.module.named_buffers(remove_duplicate=False))
        return {
            path: tensor
            for path, tensor in now.items()
            if path in state and tensor is not state[path] and path not in self.tied
        }

    def _gradients(
        self, outputs: list[Tensor], fakes: Sequence[Tensor]
    ) -> dict[tuple[str, str], Tensor]:
        """The gradients of the outputs, by their kind and the path of what they are for."""
        found = [number for number, tensor in enumerate(outputs) if tensor.requires_grad]
        self.differentiable = tuple(found)
        if self.job.from_loss:
            found = [number for number in found if number == 0]
        elif self.job.present is not None:
            present = self.job.present
            found = [n for n, given in zip(found, present, strict=True) if given]
        kinds = {"param": "grad", "buffer": "grad", "input": "grad_input"}
        wanted = [((kinds[kind], path), fake) for (kind, path), fake
                  in zip(self.inputs, fakes, strict=True) if fake.requires_grad]  # fmt: skip
        if not found or not wanted:
            return {}
        self.recorder.phase = "backward"
        with _no_autocast():
            tangents = [self._tangent(number, outputs[number]) for number in found]
            grads = torch.autograd.grad(
                [outputs[number] for number in found],
                [fake for _, fake in wanted],
                tangents,
                allow_unused=True,
            )
        pairs = zip(wanted, grads, strict=True)
        return {place: grad for (place, _), grad in pairs if grad is not None}

    def _tangent(self, number: int, output: Tensor) -> Tensor:
        if self.job.from_loss:
            return torch.ones_like(output)
        tangent = torch.empty(output.shape, dtype=output.dtype, device=output.device)
        self.recorder.mark(tangent, "tangent", str(number))
        return tangent

    def sinks(self, traced: trace.Traced) -> list[Sink]:
        """What leaves the graph."""
        sinks = [(*result, node) for result, node in zip(self.results, traced.outputs, strict=True)]
        for index, node in traced.written.items():
            kind, path = self.inputs[index]
            if kind == "input":
                raise CaptureError(
                    f"the call writes into its argument `{spelt(path)}`",
                    hint=f"write into a copy, `{spelt(path)}.clone()`",
                )
            sinks.append((kind, path, node))
        kinds = ("output", *GRADIENTS, "param", "buffer")
        order = {kind: place for place, kind in enumerate(kinds)}
        return sorted(sinks, key=lambda sink: order[sink[0]])


def spelt(path: str) -> str:
    """The path of a tensor in an argument as code: places in lists and tuples are indices.

    Example:
        >>> spelt("args.0"), spelt("batch.x")
        ('args[0]', 'batch.x')
    """
    return re.sub(r"\.(\d+)(?![^.])", r"[\1]", path)


@contextmanager
def _no_autocast() -> Iterator[None]:
    """A context in which no op casts its operands: backward runs outside of autocast."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _explained(
    module: nn.Module, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]
) -> Any:
    """What the function returns; an error that comes of missing values says so."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        if path := averages_forever(error, module):
            raise CaptureError(
                f"cell `{path}` has `momentum=None`: its average goes by how often it was called",
                where=["that number is a tensor's value, which is not known before the step runs"],
                hint="give it a momentum, such as `momentum=0.1`",
            ) from error
        if lacks_values(error):
            what = str(error).splitlines()[0]
            raise value_error(what, *failed_at(error, module)) from error
        raise


def _plain_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that are attributes of modules but neither parameters nor buffers."""
    for path, part in module.named_modules():
        for name, item in part.__dict__.items():
            if isinstance(item, Tensor):
                yield (f"{path}.{name}" if path else name), item
