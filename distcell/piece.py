"""What a rank may do with its piece of a parameter, and with what is cut like it.

What looks at one element at a time (optimizers, averages of weights, clipping by value, casts) does
on a piece what it would do on the whole. What looks at the whole (norms, products, indexing, random
filling) would be silently wrong, and is refused outside of the network's call.

Note: what is guarded. The parameter itself, what its `.data`, `.grad` and `.detach()` give, and
whatever is computed from these: all are tensors of the rank's own memory, whose class alone says
what they are. torch's optimizers see plain tensors while they step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from distcell.compat import (
    allow_foreach,
    plain_in_optimizers,
    watch_collectives,
    without_overrides,
)
from distcell.errors import LayoutError
from distcell.parameter import Parameter, layout, set_layout

_NAME = "_distcell_name"
_Arguments = tuple[Any, ...]


class CutParameter(Parameter):
    """A parameter of which this rank holds a piece."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: _Arguments = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _guarded(func, args, kwargs or {})


class CutTensor(torch.Tensor):
    """A tensor that is cut like a parameter: its gradient, its data, or what was made of these."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: _Arguments = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _guarded(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"piece of `{_name(self)}`, {layout(self)}: {plain(self)}"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = _mark(plain(self).clone(), self)
        copied: torch.Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _needs_whole("pickle", self)


def guard_piece(parameter: torch.Tensor) -> None:
    """Makes a parameter that was cut refuse what is wrong on a piece: for the engine.

    Args:
        parameter: it stays the same object.

    >>> weight = Parameter(torch.zeros(2), name="up.weight")
    >>> guard_piece(weight)
    >>> type(weight).__name__
    'CutParameter'
    """
    if type(parameter) is Parameter:
        parameter.__class__ = CutParameter
        hooks = parameter._backward_hooks or {}
        for number, hook in hooks.items():  # from before it was cut
            hooks[number] = _hook(hook, parameter)


def is_guarded(tensor: object) -> bool:
    """Returns whether a tensor is a piece, and refuses what is wrong on one.

    Args:
        tensor: anything.

    >>> is_guarded(torch.zeros(2))
    False
    """
    return type(tensor) is CutTensor or type(tensor) is CutParameter


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the same memory that nothing guards: for the engine.

    Args:
        tensor: a piece, or any other tensor.

    >>> plain(torch.ones(2))
    tensor([1., 1.])
    """
    with without_overrides():
        return tensor.detach()


_NEEDS_WHOLE = frozenset(
    """
    sum mean std var var_mean std_mean prod norm max min amax amin aminmax
    median mode argmax argmin logsumexp softmax log_softmax softmin cumsum cumprod cummax cummin
    logcumsumexp sort argsort msort topk nansum nanmean nanmedian quantile nanquantile kthvalue
    count_nonzero any all equal allclose is_nonzero unique histc bincount
    matmul __matmul__ __rmatmul__ mm bmm mv dot vdot
    inner outer addmm addmm_ baddbmm baddbmm_ addmv addmv_
    addr addr_ addbmm addbmm_ diff gradient to_sparse
    einsum tensordot chain_matmul kron linear bilinear conv1d conv2d conv3d
    conv_transpose1d conv_transpose2d conv_transpose3d embedding embedding_bag layer_norm rms_norm
    group_norm batch_norm instance_norm normalize renorm renorm_ cosine_similarity
    svd qr cholesky inverse det slogdet pinverse trace matrix_exp matrix_power
    __getitem__ __setitem__ __iter__ __contains__ select narrow unbind split chunk tensor_split
    index_select gather scatter scatter_ scatter_add scatter_add_ index_fill index_fill_ index_copy
    index_copy_ index_add index_add_ index_put index_put_ take put put_ masked_select masked_scatter
    masked_scatter_ nonzero argwhere flip fliplr flipud roll rot90 tril tril_ triu triu_ diag
    diagonal eye fill_diagonal_ unfold as_strided
    normal normal_ uniform_ random_ bernoulli bernoulli_ exponential_ cauchy_ log_normal_ geometric_
    trunc_normal_ poisson multinomial rand_like randn_like randint_like dropout dropout_
    alpha_dropout feature_alpha_dropout feature_dropout native_dropout rrelu
    cat concat concatenate stack hstack vstack dstack block_diag tolist item numpy __array__
    __bool__ __float__ __int__ __complex__ __index__ _foreach_norm _foreach_max
    """.split()
)
"""Functions that look at more than one element; so do all whose result has another shape."""

_FAMILIES = ("linalg_", "fft_")
"""How the names of more such functions begin."""

_RESHAPES = frozenset(
    """
    view reshape flatten ravel unsqueeze squeeze t transpose swapaxes swapdims permute movedim
    moveaxis unflatten expand expand_as view_as reshape_as view_as_real view_as_complex
    """.split()
)
"""Functions that leave the elements what they are; the result is guarded too."""

_LIKE_A_PIECE = frozenset({"view_as", "reshape_as", "expand_as"})

_OF_TENSORS = frozenset({"grad", "data", "real", "imag", "T", "mT", "H", "mH"})
"""Attributes that are tensors."""


def _guarded(func: Any, args: _Arguments, kwargs: Mapping[str, Any]) -> Any:
    """What a function of torch gives that has a piece among its arguments."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return _attribute(func, args)
    found = next(_pieces(args, kwargs), None)
    if found is None:  # deep inside of an argument: nothing is known of it
        with without_overrides():
            return func(*args, **kwargs)
    if name in _NEEDS_WHOLE or name.startswith(_FAMILIES):
        raise _needs_whole(name, found)
    if name in _LIKE_A_PIECE and not is_guarded(args[0]):
        raise _needs_whole(name, found)
    if name == "__set__":
        _check_assigned(func, args)
    if name == "register_hook":
        args = (args[0], _hook(args[1], args[0]), *args[2:])
    try:
        with without_overrides():
            result = func(*args, **kwargs)
    except RuntimeError as error:
        _explain(name, args, kwargs, error)
        raise
    if isinstance(result, torch.Tensor):
        return _checked(name, result, found)
    if isinstance(result, (list, tuple)):
        return _checked_all(name, result, found, args)
    return result


def _attribute(func: Any, args: _Arguments) -> Any:
    with without_overrides():
        result = func(*args)
    name = getattr(getattr(func, "__self__", None), "__name__", "")
    return _mark(result, args[0]) if name in _OF_TENSORS and result is not None else result


def _checked(name: str, result: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    if is_guarded(result):
        return result
    with without_overrides():
        alike = result.shape == piece.shape or name in _RESHAPES
    if not alike:
        raise _needs_whole(name, piece)
    return _mark(result, piece)


def _checked_all(name: str, results: Any, found: torch.Tensor, args: _Arguments) -> Any:
    """The results of a function on lists, each of which goes by the piece at its place."""
    lists = [item for item in args if isinstance(item, (list, tuple))]
    for place, result in enumerate(results):
        if not isinstance(result, torch.Tensor):
            continue
        there = [item[place] for item in lists if place < len(item) and len(item) == len(results)]
        piece = next(filter(is_guarded, there), None if there else found)
        if piece is not None:
            _checked(name, result, piece)
    return results


def _mark(tensor: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    """The same tensor, guarded as the piece is."""
    if type(tensor) is torch.Tensor:
        tensor.__class__ = CutTensor
        set_layout(tensor, layout(piece))
        tensor.__dict__[_NAME] = _name(piece)
    return tensor


def _name(piece: torch.Tensor) -> str:
    return str(piece.__dict__.get(_NAME, ""))


def _pieces(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for item in (*args, *kwargs.values()):
        if is_guarded(item):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from filter(is_guarded, item)


def _hook(hook: Callable[[torch.Tensor], Any], piece: torch.Tensor) -> Callable[..., Any]:
    """A hook on gradients that gets them guarded."""

    def run(gradient: torch.Tensor) -> Any:
        return hook(_mark(gradient, piece))

    return run


# - Errors


def _needs_whole(name: str, piece: torch.Tensor) -> LayoutError:
    return LayoutError(
        f"`{name}` of `{_name(piece)}`, of which this rank holds a piece",
        where=[_sizes(piece)],
        hint=f"{_INSTEAD.get(name, 'compute it inside of the network')}; "
        "`dc.whole_tensor(parameter)` is the whole,\n"
        "`dc.local_state_dict(net)` has the pieces as plain tensors",
    )


_NORM = "`dc.clip_grad_norm_(net, max_norm)` gives the norm of all gradients"
_FILL = "fill it before the first call of the network, or `load_state_dict` the whole"
_SAVE = "save `net.state_dict()`, which has whole values"
_INSTEAD = {
    **dict.fromkeys(["norm", "linalg_vector_norm", "_foreach_norm"], _NORM),
    **dict.fromkeys("normal_ uniform_ trunc_normal_ bernoulli_ eye".split(), _FILL),
    "torch.distributed": "leave the exchange out: gradients are reduced, weights are alike",
    **dict.fromkeys("pickle numpy __array__ tolist cat".split(), _SAVE),
}
"""What to do instead of the functions that are met most."""


def _sizes(piece: torch.Tensor) -> str:
    with without_overrides():
        return f"global  {layout(piece)}     here  {list(piece.shape)}"


def _check_assigned(func: Any, args: _Arguments) -> None:
    """Refuses a value of another shape in place of a piece's data or gradient."""
    name = getattr(getattr(func, "__self__", None), "__name__", "")
    piece, value = args[0], args[1]
    if name not in ("data", "grad") or not isinstance(value, torch.Tensor):
        return
    with without_overrides():
        alike = piece.shape == value.shape
    if not alike and is_guarded(piece):
        raise _misfit(f"`.{name} =`", piece, value)


def _explain(name: str, args: _Arguments, kwargs: Mapping[str, Any], error: Exception) -> None:
    """Raises an error of ours where another tensor fits the whole of a piece, and not the piece."""
    given = [*args, *kwargs.values()]
    lists = [item for item in given if isinstance(item, (list, tuple))]
    together = [[item for item in given if isinstance(item, torch.Tensor)]]
    together += [list(items) for items in zip(*lists, strict=False)]
    with without_overrides():
        for tensors in together:
            for piece in list(filter(is_guarded, tensors))[:1]:
                for item in tensors:
                    if isinstance(item, torch.Tensor) and _fits_the_whole_alone(item, piece):
                        raise _misfit(f"`{name}`", piece, item) from error


def _fits_the_whole_alone(item: torch.Tensor, piece: torch.Tensor) -> bool:
    shape = tuple(item.shape)
    if is_guarded(item) or not _fits(shape, layout(piece).shape):
        return False
    return not _fits(shape, tuple(piece.shape))


def _fits(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    pairs = zip(reversed(shape), reversed(other), strict=False)
    return all(a == b or 1 in (a, b) for a, b in pairs)


def _misfit(what: str, piece: torch.Tensor, value: torch.Tensor) -> LayoutError:
    return LayoutError(
        f"{what} of `{_name(piece)}` with a tensor of shape {list(value.shape)}: "
        "this rank holds a piece",
        where=[_sizes(piece)],
        hint="`net.load_state_dict(...)` takes whole values, and cuts them for each rank;\n"
        "copies of weights that go along with the network's (`deepcopy`, an average) are to be\n"
        "made after its first call, and are pieces like them",
    )


def _look(item: Any) -> None:
    """Refuses a piece in a collective of the user's own: other ranks hold other parts."""
    if is_guarded(item):
        raise _needs_whole("torch.distributed", item)


watch_collectives(_look)
allow_foreach(Parameter)
allow_foreach(CutParameter)
allow_foreach(CutTensor)
plain_in_optimizers()
