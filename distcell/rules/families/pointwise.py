"""Element-wise ops: each element of a result depends on one element of each operand."""

from __future__ import annotations

from distcell.dtype import DTYPES
from distcell.rules.families.common import Linear, assemble, broadcast, define, text
from distcell.rules.notation import Call, OpRule, Rule


def pointwise(linear: Linear = (), *, monotone: bool = False) -> Rule:
    """The rule of an element-wise op with broadcasting."""

    def of(call: Call) -> OpRule:
        shape = call.results[0].shape
        tensors = [broadcast(v.shape, shape) for v in (*call.operands, *call.results)]
        return assemble(call, tensors, {}, linear=linear, monotone=monotone, priority=0)

    return of


def each(call: Call) -> list[set[int]]:
    """Linear in each operand on its own: products."""
    return [{index} for index in range(len(call.operands))]


def together(call: Call) -> list[set[int]]:
    """Linear in both operands together: sums. With a number in place of one it is not linear."""
    return [{0, 1}] if len(call.operands) == 2 else []


def by_dtype(call: Call) -> list[set[int]]:
    """A cast is linear when nothing is rounded away."""
    source, target = DTYPES[call.operands[0].dtype], DTYPES[call.results[0].dtype]
    both = source.is_floating_point and target.is_floating_point
    return [{0}] if both and target.itemsize >= source.itemsize else []


def with_zero(call: Call) -> list[set[int]]:
    """`masked_fill` is linear when it fills with zero."""
    return [{0}] if call.arg(2, "value") == 0 else []


# linear
define("neg", pointwise([{0}]), inplace=True)
define("conj_physical _conj real imag", pointwise([{0}]))
define("mul.Scalar div.Scalar", pointwise([{0}]), inplace=True)
define("mul.Tensor", pointwise(each), inplace=True)
define("div.Tensor", pointwise([{0}]), inplace=True)
define("add.Tensor sub.Tensor", pointwise(together), inplace=True)
define("rsub.Tensor", pointwise(together))
define("where.self", pointwise([{1, 2}]))
define("lerp.Scalar", pointwise([{0, 1}]), inplace=True)
define("lerp.Tensor", pointwise([{0, 1}]), inplace=True)
define("addcmul", pointwise([{0, 1}, {0, 2}]), inplace=True)
define("addcdiv", pointwise([{0, 1}]), inplace=True)
define("masked_fill.Scalar", pointwise(with_zero), inplace=True)
define("copy", pointwise([{1}]))
define("_to_copy", pointwise(by_dtype))
define("detach alias clone lift_fresh lift_fresh_copy positive", pointwise([{0}], monotone=True))

# not linear, but increasing: a partial maximum passes. Not those that are undefined somewhere
# (log, sqrt), for an empty rank holds the neutral element, an infinity.
define(
    "exp exp2 expm1 relu relu6 sigmoid tanh erf atan asinh", pointwise(monotone=True), inplace=True
)
define("floor ceil round trunc", pointwise(monotone=True))
define("clamp clamp.Tensor clamp_min clamp_max", pointwise(monotone=True))
define("maximum minimum fmax fmin", pointwise(monotone=True))

# neither
define("add.Scalar sub.Scalar", pointwise(), inplace=True)
define("rsub.Scalar", pointwise())
define(
    "log log2 log10 log1p sqrt rsqrt reciprocal square abs sign sgn frac", pointwise(), inplace=True
)
define("sin cos tan asin acos sinh cosh acosh atanh erfc erfinv lgamma digamma", pointwise())
define("elu selu celu gelu silu mish softplus hardtanh hardsigmoid hardswish", pointwise())
define("leaky_relu threshold logit nan_to_num logical_not bitwise_not isnan isinf", pointwise())
define("isfinite signbit _prelu_kernel round.decimals", pointwise())
define("pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar atan2 hypot copysign.Tensor", pointwise())
define("fmod.Scalar fmod.Tensor remainder.Scalar remainder.Tensor", pointwise())
define("floor_divide floor_divide.Scalar div.Tensor_mode div.Scalar_mode", pointwise())
define("eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar", pointwise())
define("eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor", pointwise())
define("logical_and logical_or logical_xor xlogy.Tensor heaviside", pointwise())
define("bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor", pointwise())
define("bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar", pointwise())
define("bitwise_left_shift.Tensor bitwise_right_shift.Tensor", pointwise())
define("bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar", pointwise())
define("masked_fill.Tensor where.ScalarSelf where.ScalarOther where.Scalar", pointwise())
define("polar complex logaddexp logaddexp2 fill.Scalar fill.Tensor", pointwise())

# gradients of activations: linear in what comes in
define("gelu_backward silu_backward tanh_backward sigmoid_backward", pointwise([{0}]))
define("threshold_backward elu_backward leaky_relu_backward hardtanh_backward", pointwise([{0}]))
define("hardswish_backward hardsigmoid_backward softplus_backward", pointwise([{0}]))
define("mish_backward logit_backward native_dropout_backward", pointwise([{0}]))
define("_prelu_kernel_backward log_sigmoid_backward", pointwise([{0}]))

# filled like another tensor
define("full_like zeros_like ones_like empty_like", pointwise())


def _log_sigmoid(call: Call) -> str:
    """The second result is a buffer of the backward pass, which on CUDA is empty."""
    return "* -> *, *" if call.results[1].shape == call.shape(0) else "* -> *, z!"


define("log_sigmoid_forward", text(_log_sigmoid, priority=0))
