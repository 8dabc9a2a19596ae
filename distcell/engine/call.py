"""A captured call, ready to run, joined to autograd.

One plan covers forward and backward. Its program is split in two: what does not depend on incoming
gradients runs forward and leaves saved pieces, the rest runs backward. One autograd function joins
them, so that the user's own loop (`loss.backward()`, `optimizer.step()`) works as ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distcell.capture.tree import rebuild
from distcell.compat import below_autograd, without_overrides
from distcell.engine.backend import Backend, Piece
from distcell.engine.transfer import Loadable
from distcell.errors import BackwardError, InternalError
from distcell.graph import GRADIENTS, Input
from distcell.passes.split import split_forward_backward
from distcell.program import Program, operands_of

Place = tuple[str, str]
"""The kind and the path of an input or output of a graph."""


@dataclass
class Context:
    """What one run takes: parameters and buffers by path, tensors by argument, the key."""

    states: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    key: Tensor


class LoadedCall:
    """A call of the network under a plan, as one or all ranks run it.

    Note: absent gradients. Where the user's loss leaves an output out (the logits beside a loss),
    backward for it would be work with zeros. The first time it is done so; from then on a program
    is used that was captured for the gradients that come in (`special`). Should others come in all
    the same, forward is run again with the program that takes all of them.

    Args:
        loadable: The program and what goes with it.
        backend: Where it runs.
        general: The same call for all gradients, when this one is for some only.
        gradient_factor: What the gradients of parameters are multiplied by.
    """

    def __init__(
        self,
        loadable: Loadable,
        backend: Backend,
        general: LoadedCall | None = None,
        *,
        gradient_factor: int = 1,
    ) -> None:
        self.loadable, self.backend, self.general = loadable, backend, general
        self.gradient_factor = gradient_factor
        self.special: LoadedCall | None = None
        # which gradients came in last, and which a special call was made for
        self.present: tuple[bool, ...] | None = None
        self.wanted: tuple[bool, ...] | None = None
        taking = general or self
        self.differentiable = taking.loadable.differentiable
        joint = split_forward_backward(loadable.program)
        outputs = loadable.program.graph.outputs
        self.with_gradients = [(o.kind, o.path) for o in outputs if o.kind in GRADIENTS]
        self.forward_program, self.backward_program = joint.forward, joint.backward
        self._forward = backend.load(joint.forward)
        self._backward = backend.load(joint.backward) if self.with_gradients else None
        self._constants = {
            item.value: backend.enter(joint.forward, item.value, loadable.constants[item.path])
            for item in joint.forward.graph.inputs
            if item.kind == "constant"
        }
        self.tangents = frozenset(
            i.path for i in loadable.program.graph.inputs if i.kind == "tangent"
        )
        self.gradient_needs = _gradient_needs(joint.backward)
        self._grads = {
            (o.kind, o.path): i
            for i, o in enumerate(joint.backward.graph.outputs)
            if o.kind in GRADIENTS
        }

    def __call__(self, context: Context) -> Any:
        """What the network returns; buffers are updated."""
        places = (self.general or self).with_gradients
        with without_overrides():
            wanted = [place for place in places if _of_gradient(context, place).requires_grad]
        if not wanted or not torch.is_grad_enabled():
            outputs, _ = self.run_forward(context)
            return rebuild(self.loadable.output_spec, outputs)
        leaves = [_of_gradient(context, place) for place in wanted]
        outputs = _Bridge.apply(self, context, wanted, *leaves)  # type: ignore[no-untyped-call]
        return rebuild(self.loadable.output_spec, outputs)

    def run_forward(
        self, context: Context, *, write: bool = True
    ) -> tuple[list[Tensor], list[Piece]]:
        """The outputs as the user sees them, and what backward needs.

        Args:
            context: What goes in.
            write: Whether buffers get their new values.
        """
        with without_overrides():  # what the program runs on is the rank's own, piece or not
            return self._run_forward(context, write=write)

    def _run_forward(self, context: Context, *, write: bool) -> tuple[list[Tensor], list[Piece]]:
        program = self.forward_program
        boxed = [self._piece(program, item, context) for item in program.graph.inputs]
        made = self._forward(boxed)
        outputs: list[Tensor] = []
        saved: list[Piece] = []
        for output, piece in zip(program.graph.outputs, made, strict=True):
            if output.kind == "output":
                outputs.append(_of_its_own(self.backend.leave(program, output.value, piece)))
            elif output.kind == "saved":
                saved.append(piece)
            elif write:
                self.backend.write(program, output.value, piece, context.states[output.path])
        return outputs, saved

    def run_backward(
        self, context: Context, saved: list[Piece], tangents: Mapping[str, Tensor]
    ) -> dict[Place, Tensor]:
        """The gradients by kind and path. Empties `saved`."""
        with without_overrides():
            return self._run_backward(context, saved, tangents)

    def _run_backward(
        self, context: Context, saved: list[Piece], tangents: Mapping[str, Tensor]
    ) -> dict[Place, Tensor]:
        if self._backward is None:
            raise InternalError("the call was captured without gradients")
        program = self.backward_program
        kept = iter(saved[:])
        saved.clear()
        boxed: list[Piece] = []
        for item in program.graph.inputs:
            if item.kind == "saved":
                boxed.append(next(kept))
            elif item.kind == "tangent":
                boxed.append(self.backend.enter_tangent(program, item.value, tangents[item.path]))
            else:
                boxed.append(self._piece(program, item, context))
        made = self._backward(boxed)
        found = {
            place: self.backend.leave(program, program.graph.outputs[index].value, made[index])
            for place, index in self._grads.items()
        }
        if self.gradient_factor != 1:
            for place, gradient in found.items():
                if place[0] == "grad":
                    found[place] = gradient * self.gradient_factor
        return found

    def versions(self, context: Context) -> dict[Place, int]:
        """How often each tensor that backward will read has been written into."""
        kinds = {"param", "buffer", "input"}
        inputs = self.backward_program.graph.inputs
        places = [(i.kind, i.path) for i in inputs if i.kind in kinds]
        with without_overrides():
            return {place: _find(context, place)._version for place in places}

    def check_unchanged(self, context: Context, versions: Mapping[Place, int]) -> None:
        """Checks that nothing which backward reads was written into since forward.

        Raises:
            RuntimeError: When something was, as torch does.
        """
        with without_overrides():
            changed = [p for p, v in versions.items() if _find(context, p)._version != v]
        if changed:
            raise BackwardError(
                f"`{changed[0][1]}` was changed in place between forward and backward",
                where=["backward needs the value that forward has seen"],
                hint="step the optimizer after backward, or change a copy",
            )

    def _piece(self, program: Program, item: Input, context: Context) -> Piece:
        if item.kind == "constant":
            return self._constants[item.value]
        if item.kind == "random":
            return self.backend.enter(program, item.value, context.key)
        if item.kind == "input":
            return self.backend.enter(program, item.value, context.inputs[item.path].detach())
        state = context.states[item.path].detach()
        if self.backend.holds_pieces:
            return state
        return self.backend.enter(program, item.value, state)


def _gradient_needs(program: Program) -> dict[Place, frozenset[str]]:
    """For each gradient the outputs whose incoming gradients it depends on."""
    needs: dict[str, frozenset[str]] = {
        i.value: frozenset({i.path}) if i.kind == "tangent" else frozenset()
        for i in program.graph.inputs
    }
    for op in program.graph.ops:
        for result, used in operands_of(op).items():
            needs[result] = frozenset[str]().union(*(needs[name] for name in used))
    gradients = [o for o in program.graph.outputs if o.kind in GRADIENTS]
    return {(o.kind, o.path): needs[o.value] for o in gradients}


def _of_its_own(output: Any) -> Any:
    """A tensor that is no view and no other output, on the same memory; what is no tensor as it is.

    `h` and `h.detach()` are one value of the program, but only one of them requires a gradient.
    And torch lets nobody write into a view that an autograd function returns.
    """
    if not isinstance(output, Tensor):
        return output
    with below_autograd():
        return output.detach()


def _versions_of(saved: Sequence[Piece]) -> list[int]:
    """How often each saved piece was written into; in the simulation outputs are copies."""
    return [piece._version for piece in saved if isinstance(piece, Tensor)]


def _check_saved(saved: Sequence[Piece], versions: Sequence[int]) -> None:
    """Checks that nothing was written into what forward has saved.

    Raises:
        BackwardError: When something was, as torch does.
    """
    if _versions_of(saved) != versions:
        raise BackwardError(
            "an output of the network was changed in place between forward and backward",
            where=["backward needs the value that forward has made"],
            hint="change a copy: `output.clone()`",
        )


def _find(context: Context, place: Place) -> Tensor:
    """The tensor of an input of the graph; an argument and a parameter may have one path."""
    kind, path = place
    return context.inputs[path] if kind == "input" else context.states[path]


def _of_gradient(context: Context, place: Place) -> Tensor:
    """The tensor that a gradient is of."""
    kind, path = place
    return _find(context, (GRADIENTS[kind], path))


class _Bridge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: LoadedCall, context: Context, wanted: Sequence[Place], *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        outputs, saved = call.run_forward(context)
        ctx.call, ctx.context, ctx.wanted, ctx.saved = call, context, wanted, [saved]
        ctx.versions = call.versions(context)
        ctx.saved_versions = _versions_of(saved)
        takes = set(call.differentiable)
        ctx.metas = {
            i: (tuple(t.shape), t.dtype, t.device) for i, t in enumerate(outputs) if i in takes
        }
        ctx.mark_non_differentiable(*(t for i, t in enumerate(outputs) if i not in takes))
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise BackwardError(
                "gradients of gradients of a parallel network are not built",
                hint="leave `create_graph=True` out, or compute the penalty inside of the network",
            )
        call = ctx.call
        call.check_unchanged(ctx.context, ctx.versions)
        # what was saved is freed as backward goes; a second backward (`retain_graph=True`) runs
        # forward again
        if ctx.saved:
            saved = ctx.saved.pop()
            _check_saved(saved, ctx.saved_versions)
        else:
            saved = call.run_forward(ctx.context, write=False)[1]
        given = {str(i) for i in ctx.metas if grads[i] is not None}
        (call.general or call).present = tuple(str(i) in given for i in ctx.metas)
        if not given <= call.tangents:
            call = call.general
            _, saved = call.run_forward(ctx.context, write=False)
        tangents = {}
        for index, (shape, dtype, device) in ctx.metas.items():
            grad = grads[index]
            if str(index) in call.tangents:
                zeros = torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
                tangents[str(index)] = zeros
        found = call.run_backward(ctx.context, saved, tangents)
        # what only absent gradients lead to has none, as on one device: not zeros
        reached = {p for p, needs in call.gradient_needs.items() if not needs or needs & given}
        return (None, None, None, *(found.get(p) if p in reached else None for p in ctx.wanted))
