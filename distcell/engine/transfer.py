"""One rank plans, the others receive the program: as JSON, never pickled.

Eight ranks on two cores would plan four times slower if each did it for itself. What a call returns
(its containers) is sent by the names of their classes; where that is not possible, every rank
captures for itself: slower, and the same.
"""

from __future__ import annotations

import base64
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distcell.capture.tree import Node, Slot, Spec
from distcell.dtype import DTYPES, name_of
from distcell.errors import DistcellError, RankMismatchError
from distcell.program import Program
from distcell.runtime.collectives import Collectives
from distcell.runtime.world import preparing


@dataclass(frozen=True)
class Loadable:
    """What a rank needs to run a captured call or step.

    Args:
        program: The program.
        constants: The tensors that the code made, by path.
        output_spec: The structure of what is returned.
        differentiable: The numbers of the outputs that gradients come in for.
        extra: Further JSON values, such as how the optimizer's state begins.
    """

    program: Program
    constants: Mapping[str, Tensor]
    output_spec: Spec
    differentiable: tuple[int, ...] = ()
    extra: Any = None


class NotSendableError(Exception):
    """Something in the result of a call has no form that can be sent."""


def plan_on_one_rank(collectives: Collectives, make: Callable[[], Loadable]) -> Loadable:
    """What `make` gives on rank 0, on every rank.

    Args:
        collectives: Of all ranks; every rank must call this.
        make: Plans. It is called on rank 0, and on all when its result cannot be sent.

    Raises:
        DistcellError: The error of rank 0, on every rank.
    """
    if len(collectives.mesh.axes) == 0 or collectives.mesh.size == 1:
        return make()
    mine: Loadable | None = None
    message: dict[str, Any] = {}
    failure: BaseException | None = None
    if collectives.rank == 0:
        try:
            with preparing():
                mine = make()
                message = {"loadable": encode(mine)}
        except NotSendableError:
            message = {"each": True}
        except DistcellError as error:
            failure = error
            message = {"error": [type(error).__name__, str(error), *_parts(error)]}
        except Exception as error:
            failure = error
            message = {"error": ["RankMismatchError", f"rank 0 could not plan: {error}", [], None]}
    received = collectives.all_gather_object(message)[0]
    if failure is not None:
        raise failure
    if "error" in received:
        raise _as_error(received["error"])
    if mine is not None:
        return mine
    if "each" not in received:
        return decode(received["loadable"])
    with preparing():
        return make()


def _parts(error: DistcellError) -> tuple[list[str], str | None]:
    return [str(line) for line in error.where], error.hint


def _as_error(content: list[Any]) -> DistcellError:
    from distcell import errors

    name, message, where, hint = content
    kind = getattr(errors, name, RankMismatchError)
    found: DistcellError = kind(message.splitlines()[0], where=where, hint=hint)
    return found


def encode(loadable: Loadable) -> dict[str, Any]:
    """A loadable as JSON values.

    Raises:
        NotSendableError: When the result of the call has a class or a literal that cannot be named.
    """
    return {
        "program": loadable.program.to_json(),
        "constants": {path: encode_tensor(t) for path, t in loadable.constants.items()},
        "output_spec": encode_spec(loadable.output_spec),
        "differentiable": list(loadable.differentiable),
        "extra": loadable.extra,
    }


def decode(content: Mapping[str, Any]) -> Loadable:
    """The loadable that `encode` wrote."""
    return Loadable(
        Program.from_json(content["program"]),
        {path: decode_tensor(item) for path, item in content["constants"].items()},
        decode_spec(content["output_spec"]),
        tuple(content["differentiable"]),
        content["extra"],
    )


def encode_tensor(tensor: Tensor) -> list[Any]:
    """Shape, dtype and bytes of a tensor."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    text = base64.b64encode(data.numpy().tobytes()).decode()
    return [list(tensor.shape), name_of(tensor.dtype), text]


def decode_tensor(content: list[Any]) -> Tensor:
    """The tensor that `encode_tensor` wrote."""
    shape, dtype, text = content
    data = bytearray(base64.b64decode(text))
    if not data:
        return torch.empty(shape, dtype=DTYPES[dtype])
    return torch.frombuffer(data, dtype=torch.uint8).view(DTYPES[dtype]).reshape(shape)


def encode_spec(spec: Spec) -> Any:
    """The structure of a result as JSON values.

    Raises:
        NotSendableError: See `encode`.
    """
    if isinstance(spec, Slot):
        return {"slot": spec.index}
    if isinstance(spec, Node):
        kind = f"{spec.kind.__module__}:{spec.kind.__qualname__}"
        if _named(kind) is not spec.kind:
            raise NotSendableError(kind)
        keys = [_literal(key) for key in spec.keys]
        return {"node": kind, "keys": keys, "items": [encode_spec(i) for i in spec.items]}
    return {"literal": _literal(spec)}


def decode_spec(content: Any) -> Spec:
    """The structure that `encode_spec` wrote."""
    if "slot" in content:
        return Slot(content["slot"])
    if "literal" in content:
        return content["literal"]
    kind = _named(content["node"])
    if kind is None:
        raise RankMismatchError(f"this rank has no class {content['node']}")
    return Node(kind, tuple(content["keys"]), tuple(map(decode_spec, content["items"])))


def _literal(item: Any) -> Any:
    if item is None or isinstance(item, (bool, int, float, str)):
        return item
    raise NotSendableError(repr(item))


def _named(name: str) -> type | None:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return None
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None
