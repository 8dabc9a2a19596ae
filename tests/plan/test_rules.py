"""Every rule in the table, split in every way that it allows, against the whole op."""

import itertools
from dataclasses import replace

import pytest
import torch

from distcell.errors import RuleError
from distcell.graph import Graph, Input, Op, Ref, Value
from distcell.partition.infer import infer_results
from distcell.rules import constrain, table  # noqa: F401  constrain registers itself
from distcell.rules.check import check_rule
from distcell.rules.notation import Call, OpDef, rule

torch.set_num_threads(1)
GENERATOR = torch.Generator().manual_seed(0)
INF = float("inf")
F64, CPU = torch.float64, torch.device("cpu")


def R(*shape):
    """Normally distributed numbers."""
    return torch.randn(shape, generator=GENERATOR, dtype=F64)


def P(*shape):
    """Numbers between 0.1 and 0.9."""
    return torch.rand(shape, generator=GENERATOR, dtype=F64) * 0.8 + 0.1


def I(high, *shape):  # noqa: E743
    """Whole numbers below a bound."""
    return torch.randint(0, high, shape, generator=GENERATOR)


def B(*shape):
    """Truth values."""
    return torch.rand(shape, generator=GENERATOR) < 0.5


EXAMPLES = []


def ex(targets, *args, **kwargs):
    for name in targets.split():
        dots = name.count(".")
        plain = name.startswith(("py.", "distcell.")) or dots == 2
        target = name if plain else f"aten.{name}" if dots else f"aten.{name}.default"
        EXAMPLES.append((target, args, kwargs))


def of_results(target, *args):
    """What an op of torch gives, for examples of its gradient."""
    return table.torch_operator(f"aten.{target}.default")(*args)


# --- element-wise ---------------------------------------------------------------------------------
ex("neg conj_physical real detach alias clone lift_fresh lift_fresh_copy positive", R(4, 3))
ex("imag _conj", torch.complex(R(4, 3), R(4, 3)))
ex("mul.Scalar div.Scalar add.Scalar sub.Scalar rsub.Scalar", R(4, 3), 2.5)
ex("add.Tensor sub.Tensor mul.Tensor div.Tensor rsub.Tensor", R(2, 4, 3), P(4, 1))
ex("add.Tensor mul.Tensor", R(4, 1), R(3))
ex("add.Tensor mul.Tensor div.Tensor", R(4, 3), 2.0)
ex("add.Tensor", R(4, 3), R(4, 3), alpha=3)
ex("where.self", B(4, 3), R(4, 3), R(3))
ex("where.ScalarSelf", B(4, 3), 1.0, R(4, 3))
ex("where.ScalarOther", B(4, 3), R(4, 3), 1.0)
ex("where.Scalar", B(4, 3), 2.0, 1.0)
ex("lerp.Scalar", R(4, 3), R(4, 3), 0.3)
ex("lerp.Tensor", R(4, 3), R(4, 3), P(4, 3))
ex("addcmul addcdiv", R(4, 3), R(4, 3), P(4, 3), value=0.5)
ex("masked_fill.Scalar", R(4, 3), B(4, 3), 0.0)
ex("masked_fill.Scalar", R(4, 3), B(3), -INF)
ex("masked_fill.Tensor", R(4, 3), B(4, 3), torch.tensor(2.0, dtype=F64))
ex("copy", R(4, 3), R(3))
ex("_to_copy", R(4, 3).float(), dtype=F64)
ex("_to_copy", R(4, 3), dtype=torch.float32)
ex("_to_copy", I(5, 4, 3), dtype=F64)
ex("exp exp2 expm1 relu relu6 sigmoid tanh erf atan asinh floor ceil round trunc", R(4, 3))
ex("clamp", R(4, 3), -0.5, 0.5)
ex("clamp.Tensor", R(4, 3), R(3) - 1, R(3) + 1)
ex("clamp_min clamp_max", R(4, 3), 0.1)
ex("maximum minimum fmax fmin", R(4, 3), R(4, 1))
ex("log log2 log10 log1p sqrt rsqrt reciprocal square abs sign sgn frac", P(4, 3))
ex("sin cos tan asin acos sinh cosh atanh erfc erfinv lgamma digamma logit", P(4, 3))
ex("acosh", P(4, 3) + 1)
ex("elu selu celu gelu silu mish softplus hardtanh hardsigmoid hardswish leaky_relu", R(4, 3))
ex("gelu", R(4, 3), approximate="tanh")
ex("threshold", R(4, 3), 0.1, 0.0)
ex("nan_to_num logical_not isnan isinf isfinite signbit", R(4, 3))
ex("round.decimals", R(4, 3), decimals=1)
ex("bitwise_not", I(5, 4, 3))
ex("_prelu_kernel", R(2, 4, 3), R(1, 4, 1))
ex("_prelu_kernel_backward", R(2, 4, 3), R(2, 4, 3), R(1, 4, 1))
ex("pow.Tensor_Scalar", R(4, 3), 2)
ex("pow.Tensor_Tensor atan2 hypot copysign.Tensor", P(4, 3), P(3))
ex("pow.Scalar", 2.0, R(4, 3))
ex("fmod.Scalar remainder.Scalar floor_divide.Scalar", R(4, 3), 0.4)
ex("fmod.Tensor remainder.Tensor floor_divide", R(4, 3), P(4, 3))
ex("div.Tensor_mode", R(4, 3), P(4, 3), rounding_mode="floor")
ex("div.Scalar_mode", R(4, 3), 0.3, rounding_mode="trunc")
ex("eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar", I(3, 4, 3), 1)
ex("eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor", I(3, 4, 3), I(3, 4, 1))
ex("logical_and logical_or logical_xor", B(4, 3), B(3))
ex("xlogy.Tensor heaviside logaddexp logaddexp2 polar complex", P(4, 3), P(4, 3))
ex("bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor", I(8, 4, 3), I(8, 4, 3))
ex("bitwise_left_shift.Tensor bitwise_right_shift.Tensor", I(8, 4, 3), I(3, 4, 3))
ex("bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar", I(8, 4, 3), 5)
ex("bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar", I(8, 4, 3), 2)
ex("fill.Scalar", R(4, 3), 2.0)
ex("fill.Tensor", R(4, 3), torch.tensor(2.0, dtype=F64))
ex("gelu_backward silu_backward tanh_backward sigmoid_backward", R(4, 3), P(4, 3))
ex("hardswish_backward hardsigmoid_backward mish_backward logit_backward", R(4, 3), P(4, 3))
ex("threshold_backward", R(4, 3), R(4, 3), 0.0)
ex("elu_backward", R(4, 3), 1.0, 1, 1, False, R(4, 3))
ex("leaky_relu_backward", R(4, 3), R(4, 3), 0.01, False)
ex("hardtanh_backward", R(4, 3), R(4, 3), -1.0, 1.0)
ex("softplus_backward", R(4, 3), R(4, 3), 1, 20)
ex("native_dropout_backward", R(4, 3), B(4, 3), 2.0)
ex("log_sigmoid_forward", R(4, 3))
ex("log_sigmoid_backward", R(4, 3), R(4, 3), P(4, 3))
ex("full_like", R(4, 3), 2.0)
ex("zeros_like ones_like", R(4, 3))
ex("distcell.constrain", R(4, 3))

# --- products -------------------------------------------------------------------------------------
ex("mm", R(4, 5), R(5, 3))
ex("bmm", R(2, 4, 5), R(2, 5, 3))
ex("mv", R(4, 5), R(5))
ex("dot vdot", R(5), R(5))
ex("addmm", R(3), R(4, 5), R(5, 3))
ex("addmm", R(4, 1), R(4, 5), R(5, 3), beta=2, alpha=3)
ex("baddbmm", R(2, 1, 3), R(2, 4, 5), R(2, 5, 3))
ex("addmv", R(4), R(4, 5), R(5))

# --- rearrangements -------------------------------------------------------------------------------
VIEW = "view reshape _unsafe_view _reshape_copy"
ex(VIEW, R(4, 3, 2), (12, 2))
ex(VIEW, R(12, 2), (4, 3, 2))
ex(VIEW, R(4, 6), (-1,))
ex("view", R(4, 6), (6, 4))
ex("view", R(8, 4), (2, 16))
ex("view", R(3, 1, 4, 5), (12, 5, 1))
ex("view", R(6, 4, 5), (4, 6, 5))
ex("view", R(1), ())
ex("view", torch.zeros(0, 4), (4, 0))
ex("permute", R(4, 3, 2), (2, 0, -2))
ex("transpose.int", R(4, 3, 2), -1, 0)
ex("t numpy_T", R(4, 3))
ex("t", R(4))
ex("expand broadcast_to", R(4, 1), (2, 4, 3))
ex("expand", R(1, 4), (-1, 4))
ex("unsqueeze", R(4, 3), -1)
ex("squeeze", R(4, 1, 3))
ex("squeeze.dim", R(4, 1, 3), 1)
ex("squeeze.dim", R(4, 1, 3), 0)
ex("squeeze.dims", R(4, 1, 3, 1), (1, 3))
ex("repeat", R(4, 3), (2, 1, 3))
ex("flip", R(4, 3), (0,))
ex("roll", R(4, 3), (1,), (0,))
ex("roll", R(4, 3), (1,))
ex("view_as_real", torch.complex(R(4, 3), R(4, 3)))
ex("view_as_complex", R(4, 3, 2))
ex("view.dtype", R(4, 3), torch.int64)
ex("view.dtype", R(4, 3), torch.int32)

# --- pieces ---------------------------------------------------------------------------------------
ex("cat", (R(4, 3), R(4, 3)), 1)
ex("cat", (R(4, 3), R(2, 3)))
ex("cat", (torch.zeros(0, dtype=F64), R(4, 3)))
ex("stack", (R(4, 3), R(4, 3)), -1)
ex("split.Tensor", R(4, 9), 3, 1)
ex("split.Tensor", R(5, 3), 2)
ex("split_with_sizes", R(4, 9), (3, 3, 3), -1)
ex("split_with_sizes", R(4, 9), (4, 3, 2), -1)
ex("unbind.int", R(4, 3), 1)
ex("slice.Tensor", R(4, 6), 1, 0, 9223372036854775807)
ex("slice.Tensor", R(4, 6), -1, 3, 9223372036854775807)
ex("slice.Tensor", R(4, 6), 1, None, 2)
ex("slice.Tensor", R(4, 6), 1, 3)
ex("slice.Tensor", R(4, 6), 1, 1, -1)
ex("slice.Tensor", R(4, 6), 1, 0, 6, 2)
ex("slice_backward", R(4, 3), (4, 6), 1, 3, 6, 1)
ex("slice_backward", R(4, 2), (4, 6), 1, 1, 3, 1)
ex("slice_backward", R(4, 6), (4, 6), 1, 0, 9223372036854775807, 1)
ex("slice_scatter", R(4, 6), R(4, 2), 1, 1, 3)
ex("select_scatter", R(4, 6), R(4), 1, 2)
ex("select.int", R(4, 5), 1, -2)
ex("select_backward", R(4), (4, 5), 1, -2)
ex("diagonal diagonal_copy", R(2, 4, 3), 0, 1, 2)
ex("diagonal_backward", R(2, 3), (2, 4, 3), 0, 1, 2)
ex("constant_pad_nd", R(4, 3), (1, 0))
ex("constant_pad_nd", R(4, 3), (0, 0, 1, -1), 2.0)
ex("reflection_pad1d replication_pad1d", R(2, 3, 4), (1, 2))
ex("reflection_pad2d replication_pad2d", R(2, 3, 4, 4), (1, 2, 1, 0))
ex("reflection_pad3d replication_pad3d", R(2, 3, 3, 3, 3), (1, 2, 1, 0, 1, 1))
ex("reflection_pad1d_backward replication_pad1d_backward", R(2, 3, 7), R(2, 3, 4), (1, 2))
ex(
    "reflection_pad2d_backward replication_pad2d_backward",
    R(2, 3, 5, 7),
    R(2, 3, 4, 4),
    (1, 2, 1, 0),
)
ex("glu", R(4, 6))
ex("glu", R(8, 3), 0)
ex("glu_backward", R(4, 3), R(4, 6), -1)
ex("unfold", R(4, 6), 1, 3, 2)

# --- reductions -----------------------------------------------------------------------------------
ex("sum mean amax amin max min prod median", R(4, 3))
ex("any all", B(4, 3))
ex("sum.dim_IntList mean.dim", R(2, 4, 3), (-1, 0))
ex("sum.dim_IntList mean.dim amax amin", R(2, 4, 3), (1,), True)
ex("sum.dim_IntList mean.dim", R(4, 3), None)
ex("mean", I(9, 4, 3), dtype=F64)
ex("max.dim min.dim median.dim nanmedian.dim mode", R(4, 3), 1)
ex("argmax argmin", R(4, 3), -1)
ex("argmax", R(4, 3))
ex("prod.dim_int", R(4, 3), 1)
ex("any.dim all.dim", B(4, 3), 1)
ex("any.dims all.dims", B(4, 3), (1,))
ex("cumsum cumprod logcumsumexp cummax cummin", P(4, 3), -1)
ex("sort argsort", R(4, 3), 0)
ex("sort.stable", R(4, 3), stable=True, dim=0)
ex("topk", R(4, 5), 2)
ex("kthvalue", R(4, 5), 2)
ex("var.correction std.correction", R(4, 3), (0,), correction=1)
ex("var.correction", R(4, 3))
ex("var_mean.correction std_mean.correction", R(4, 3), (1,), correction=0, keepdim=True)
ex("logsumexp", R(4, 3), (1,))
ex("logsumexp", torch.full((4, 3), -INF, dtype=F64), (0,), True)
ex("linalg_vector_norm", R(4, 3))
ex("linalg_vector_norm", R(4, 3), 2.0, (1,), True)
for order in (0, 1, 3, INF, -INF):
    ex("linalg_vector_norm", R(4, 3), order, (0,))
ex("norm.ScalarOpt_dim", R(4, 3), 2, (1,))

# in another dtype
ex("linalg_vector_norm", I(2, 4, 3).float() + 1 / 3, dtype=F64)
for order in (0, 1, 2, 3, INF, -INF):
    ex("linalg_vector_norm", (R(4, 3) / 3).float(), order, (0,), True, dtype=F64)
    ex("linalg_vector_norm", torch.complex(R(4, 3), R(4, 3)), order, (0,))
ex("sum mean prod", R(4, 3).float(), dtype=F64)
ex("sum mean prod", I(3, 4, 3), dtype=F64)
ex("sum prod", I(3, 4, 3), dtype=torch.int32)
ex("sum.dim_IntList mean.dim", R(4, 3).float(), (0,), dtype=F64)
ex("sum.dim_IntList mean.dim", R(4, 3).bfloat16(), (0,), dtype=F64)
ex("sum.dim_IntList", B(4, 3), (0,))
ex("prod.dim_int cumsum cumprod", R(4, 3).float(), 0, dtype=F64)
ex("var.correction std.correction", torch.complex(R(4, 3), R(4, 3)), (0,), correction=1)
ex("logsumexp", I(5, 4, 3), (1,))

# --- softmax --------------------------------------------------------------------------------------
MASKED = R(4, 5).masked_fill(B(4, 5), -INF)
MASKED[1] = -INF
ex("_softmax _log_softmax", R(4, 5), 1, False)
ex("_softmax", R(4, 5), -2, False)
ex("_safe_softmax", MASKED, -1)
ex("_safe_softmax", MASKED.float(), -1, F64)
ex("_softmax_backward_data", R(4, 5), torch.softmax(R(4, 5), 1), 1, F64)
ex("_log_softmax_backward_data", R(4, 5), torch.log_softmax(R(4, 5), 1), -1, F64)

# --- attention ------------------------------------------------------------------------------------
SDPA = "_scaled_dot_product_flash_attention_for_cpu"
QKV = R(2, 3, 4, 2), R(2, 3, 5, 2), R(2, 3, 5, 2)
SQUARE = R(2, 3, 4, 2), R(2, 3, 4, 2), R(2, 3, 4, 2)
ex(SDPA, *QKV)
ex(SDPA, *SQUARE, 0.0, True)
ex(SDPA, *QKV, attn_mask=R(4, 5))
ex(SDPA, *QKV, attn_mask=R(2, 1, 4, 5), scale=0.3)
ex(f"{SDPA}_backward", R(2, 3, 4, 2), *QKV, *of_results(SDPA, *QKV), 0.0, False)
ex(f"{SDPA}_backward", R(2, 3, 4, 2), *SQUARE, *of_results(SDPA, *SQUARE, 0.0, True), 0.0, True)

# --- normalisation --------------------------------------------------------------------------------
ALL = (True, True, True)


def masks(count, most=None):
    """Every choice of gradients that are asked for, of the first `most`; at least one."""
    most = count if most is None else most
    rest = (False,) * (count - most)
    return [(*m, *rest) for m in itertools.product((True, False), repeat=most) if any(m)]


LN = R(2, 4, 3)
ex("native_layer_norm", LN, (3,), R(3), R(3), 1e-5)
ex("native_layer_norm", LN, (4, 3), None, None, 1e-5)
STATS = of_results("native_layer_norm", LN, (3,), None, None, 1e-5)[1:]
for mask in masks(3):
    ex("native_layer_norm_backward", R(2, 4, 3), LN, (3,), *STATS, R(3), R(3), mask)
for mask in masks(3, most=2):
    ex("native_layer_norm_backward", R(2, 4, 3), LN, (3,), *STATS, R(3), None, mask)
ex("native_layer_norm_backward", R(2, 4, 3), LN, (3,), *STATS, None, None, (True, False, False))
ex("_fused_rms_norm", LN, (3,), R(3), None)
GN = R(2, 6, 3)
ex("native_group_norm", GN, R(6), R(6), 2, 6, 3, 3, 1e-5)
ex("native_group_norm", GN, None, None, 2, 6, 3, 2, 1e-5)
GN_STATS = of_results("native_group_norm", GN, None, None, 2, 6, 3, 3, 1e-5)[1:]
for mask in masks(3):
    ex("native_group_norm_backward", R(2, 6, 3), GN, *GN_STATS, R(6), 2, 6, 3, 3, mask)
ex("native_group_norm_backward", R(2, 6, 3), GN, *GN_STATS, None, 2, 6, 3, 3, (True, False, False))
BN = R(4, 3, 2, 2)
ex("native_batch_norm", BN, R(3), R(3), None, None, True, 0.1, 1e-5)
ex("native_batch_norm", BN, R(3), R(3), R(3), P(3), False, 0.1, 1e-5)
ex("_native_batch_norm_legit_functional", BN, R(3), R(3), R(3), P(3), True, 0.1, 1e-5)
ex("_native_batch_norm_legit_functional", BN, None, None, R(3), P(3), False, 0.1, 1e-5)
BN_STATS = of_results("native_batch_norm", BN, None, None, None, None, True, 0.1, 1e-5)[1:]
NOTHING = torch.zeros(0, dtype=F64)
BN_BACK = "native_batch_norm_backward"
for mask in masks(3):
    ex(BN_BACK, R(4, 3, 2, 2), BN, R(3), R(3), P(3), *BN_STATS, True, 1e-5, mask)
ex(BN_BACK, R(4, 3, 2, 2), BN, None, None, None, *BN_STATS, True, 1e-5, (True, False, False))
ex(BN_BACK, R(4, 3, 2, 2), BN, R(3), R(3), P(3), NOTHING, NOTHING, False, 1e-5, ALL)
ex(BN_BACK, R(4, 3, 2, 2), BN, R(3), R(3), P(3), *BN_STATS, False, 1e-5, (False, True, True))

# --- indexing -------------------------------------------------------------------------------------
ex("embedding", R(5, 3), I(5, 4, 2))
ex("embedding_dense_backward", R(4, 2, 3), I(5, 4, 2), 5, -1, False)
ex("embedding_dense_backward", R(4, 2, 3), I(5, 4, 2), 5, 2, False)
ex("embedding_dense_backward", R(4, 2, 3), I(5, 4, 2), 5, -1, True)
ex("index_select", R(4, 5), 1, I(5, 3))
ex("index.Tensor", R(4, 5), (I(4, 3) - 2,))
ex("index.Tensor", R(4, 5, 3), (None, I(5, 2, 2)))
ex("index.Tensor", R(4, 5, 3), (I(4, 6), I(5, 6)))
ex("index.Tensor", R(4, 5, 3), (I(4, 6), None, I(3, 2, 1)))
ex("index.Tensor", R(4, 3), (B(4),))
ex("index_put", R(5, 3), (I(5, 4) - 2,), R(4, 3), True)
ex("index_put", R(5, 3), (I(5, 4),), R(1, 3), True)
ex("index_put", R(5, 3), (torch.tensor([2, 0]),), R(2, 3))
ex("index_put", R(4, 5, 3), (I(4, 6), I(5, 6)), R(6, 3), True)
ex("_unsafe_index_put", R(4, 5), (None, I(5, 3)), R(4, 3), True)
ex("index_add", R(5, 3), 0, I(5, 4), R(4, 3))
ex("index_add", R(5, 3), 0, I(5, 4), R(4, 3), alpha=2)
ex("gather", R(4, 5), 1, I(5, 4, 3))
ex("gather", R(4, 5), 1, I(5, 2, 3))
ex("gather", R(5), 0, I(5, 4))
ex("scatter_add", R(4, 5), 1, I(5, 4, 3), R(4, 3))
ex("scatter_add", R(4, 5), 1, I(5, 2, 3), R(4, 4))
ex("scatter.value", R(4, 5), 1, I(5, 4, 2), 7.0)
ex("scatter.src", R(4, 5), 1, torch.tensor([[1, 3]] * 4), R(4, 2))
ex("scatter_reduce.two", R(4, 5), 1, I(5, 4, 2), R(4, 2), "amax")
ex("bucketize.Tensor", R(4, 3), torch.tensor([-1.0, 0.0, 1.0], dtype=F64))
ex("tril triu", R(2, 4, 5))
ex("tril triu", R(4, 5), -1)
ex("distcell.take.default", R(4, 5, 3), 1, I(5, 2, 3))
ex("distcell.add_take.default", R(4, 2, 3), 1, I(5, 2), 5)
ex("distcell.pick.default", R(4, 5), 1, I(5, 4, 3))
ex("distcell.add_pick.default", R(4, 3), 1, I(5, 4, 3), 5)
ex("distcell.select.default", R(4, 5), 1, 3)
ex("distcell.unselect.default", R(4), 1, 3, 5)
ex("distcell.tril.default distcell.triu.default", R(4, 5), 1, 0, 0)

# --- losses ---------------------------------------------------------------------------------------
for reduction in (0, 1, 2):
    small = () if reduction else (4, 3)
    ex("mse_loss smooth_l1_loss huber_loss soft_margin_loss", R(4, 3), R(4, 3), reduction)
    ex("mse_loss_backward soft_margin_loss_backward", R(*small), R(4, 3), R(4, 3), reduction)
    ex("smooth_l1_loss_backward huber_loss_backward", R(*small), R(4, 3), R(4, 3), reduction, 0.5)
    ex("binary_cross_entropy", P(4, 3), P(4, 3), None, reduction)
    ex("binary_cross_entropy", P(4, 3), P(4, 3), P(4, 3), reduction)
    ex("binary_cross_entropy_with_logits", R(4, 3), P(4, 3), None, P(3), reduction)
    ex("binary_cross_entropy_backward", R(*small), P(4, 3), P(4, 3), None, reduction)
    ex("binary_cross_entropy_backward", R(*small), P(4, 3), P(4, 3), P(4, 3), reduction)
    NLL = torch.log_softmax(R(4, 5), 1), torch.tensor([3, 1, 0, 1])
    NLL2D = torch.log_softmax(R(2, 5, 3, 2), 1), I(5, 2, 3, 2)
    for ignored, weight in ((-100, None), (1, P(5))):
        ex("nll_loss_forward", *NLL, weight, reduction, ignored)
        ex("nll_loss2d_forward", *NLL2D, weight, reduction, ignored)
        rows = R(4) if reduction == 0 else R()
        ex("nll_loss_backward", rows, *NLL, weight, reduction, ignored, P())
        rows = R(2, 3, 2) if reduction == 0 else R()
        ex("nll_loss2d_backward", rows, *NLL2D, weight, reduction, ignored, P())
ex("mse_loss", R(4, 3), R(4, 3))
ex("nll_loss_forward", NLL[0], torch.full((4,), -100), None, 1, -100)
ex("nll_loss_forward", R(5), torch.tensor(2), None, 1, -100)

# --- convolution and pooling ----------------------------------------------------------------------


def conv(shape, weight, bias, *, stride=1, padding=0, transposed=False, groups=1):
    x, w = R(*shape), R(*weight)
    outs = weight[1] * groups if transposed else weight[0]
    count = len(shape) - 2
    rest = ((stride,) * count, (padding,) * count, (1,) * count, transposed, (0,) * count, groups)
    b = R(outs) if bias else None
    ex("convolution", x, w, b, *rest)
    y = of_results("convolution", x, w, b, *rest)
    sizes = (outs,) if bias else None
    for mask in masks(3, most=2 + bias):
        ex("convolution_backward", R(*y.shape), x, w, sizes, *rest, mask)


conv((2, 3, 4, 4), (4, 3, 3, 3), True, padding=1)
conv((2, 3, 4, 4), (4, 3, 3, 3), False)
conv((2, 3, 4, 6), (4, 3, 1, 1), True)
conv((2, 3, 4, 6), (4, 3, 2, 2), True, stride=2)
conv((2, 4, 5), (6, 2, 3), True, padding=1, groups=2)
conv((2, 4, 5), (4, 1, 3), False, padding=1, groups=4)
conv((2, 3, 4), (3, 4, 2), True, stride=2, transposed=True)
conv((2, 4, 4), (4, 3, 2), True, stride=2, transposed=True, groups=2)
POOL = R(2, 3, 4, 4)
ex("avg_pool2d", POOL, (2, 2), (2, 2))
ex("avg_pool2d", R(3, 4, 4), (2, 2))
ex("avg_pool1d", R(2, 3, 4), (2,))
ex("avg_pool3d", R(2, 3, 4, 4, 4), (2, 2, 2))
ex("adaptive_avg_pool1d", R(2, 3, 4), (3,))
ex("adaptive_avg_pool2d _adaptive_avg_pool2d", POOL, (3, 3))
ex("adaptive_avg_pool3d _adaptive_avg_pool3d", R(2, 3, 4, 4, 4), (3, 3, 3))
ex("avg_pool2d_backward", R(2, 3, 2, 2), POOL, (2, 2), (2, 2), (0, 0), False, True, None)
ex(
    "avg_pool3d_backward",
    R(2, 3, 2, 2, 2),
    R(2, 3, 4, 4, 4),
    (2,) * 3,
    (2,) * 3,
    (0,) * 3,
    False,
    True,
    None,
)
ex("_adaptive_avg_pool2d_backward", R(2, 3, 3, 3), POOL)
ex("_adaptive_avg_pool3d_backward", R(2, 3, 3, 3, 3), R(2, 3, 4, 4, 4))
ex("max_pool2d_with_indices", POOL, (2, 2), (2, 2))
ex("max_pool3d_with_indices", R(2, 3, 4, 4, 4), (2,) * 3)
ex("adaptive_max_pool2d", POOL, (2, 2))
ex("adaptive_max_pool3d", R(2, 3, 4, 4, 4), (2,) * 3)
WHERE = of_results("max_pool2d_with_indices", POOL, (2, 2), (2, 2))[1]
ex(
    "max_pool2d_with_indices_backward",
    R(2, 3, 2, 2),
    POOL,
    (2, 2),
    (2, 2),
    (0, 0),
    (1, 1),
    False,
    WHERE,
)
ex("adaptive_max_pool2d_backward", R(2, 3, 2, 2), POOL, WHERE)
CUBE = R(2, 3, 4, 4, 4)
WHERE3 = of_results("max_pool3d_with_indices", CUBE, (2,) * 3)[1]
ex(
    "max_pool3d_with_indices_backward",
    R(2, 3, 2, 2, 2),
    CUBE,
    (2,) * 3,
    (2,) * 3,
    (0,) * 3,
    (1,) * 3,
    False,
    WHERE3,
)
ex("adaptive_max_pool3d_backward", R(2, 3, 2, 2, 2), CUBE, WHERE3)
ex("upsample_nearest1d", R(2, 3, 4), (8,))
ex("upsample_nearest2d", POOL, (8, 8))
ex("upsample_nearest3d", CUBE, (8, 8, 8))
ex("upsample_bilinear2d upsample_bicubic2d", POOL, (6, 6), False)
ex("upsample_nearest1d_backward", R(2, 3, 8), (8,), (2, 3, 4))
ex("upsample_nearest2d_backward", R(2, 3, 8, 8), (8, 8), (2, 3, 4, 4))
ex("upsample_nearest3d_backward", R(2, 3, 8, 8, 8), (8, 8, 8), (2, 3, 4, 4, 4))
ex(
    "upsample_bilinear2d_backward upsample_bicubic2d_backward",
    R(2, 3, 6, 6),
    (6, 6),
    (2, 3, 4, 4),
    False,
)

# --- batches of matrices --------------------------------------------------------------------------
SYMMETRIC = R(3, 4, 4)
SYMMETRIC = SYMMETRIC @ SYMMETRIC.transpose(1, 2) + torch.eye(4).double()
ex("linalg_inv_ex linalg_cholesky_ex linalg_qr linalg_matrix_exp _linalg_det", SYMMETRIC)
ex("_linalg_eigh linalg_lu_factor_ex", SYMMETRIC)
ex("pixel_shuffle", R(3, 4, 2, 2), 2)
ex("pixel_unshuffle", R(3, 4, 2, 2), 2)
ex("im2col", R(3, 2, 4, 4), (2, 2), (1, 1), (0, 0), (2, 2))
ex("col2im", R(3, 8, 4), (4, 4), (2, 2), (1, 1), (0, 0), (2, 2))
ex("grid_sampler_2d", R(3, 2, 4, 4), R(3, 2, 2, 2), 0, 0, False)
ex("_cdist_forward", R(2, 3, 4), R(2, 5, 4), 2.0, None)

# --- factories ------------------------------------------------------------------------------------
ex("full", (4, 3), 2.0, dtype=F64, device=CPU)
ex("zeros ones", (4, 3), dtype=F64)
ex("scalar_tensor", 2.0, dtype=F64)
ex("new_zeros new_ones", R(5), (4, 3))
ex("new_full", R(5), (4, 3), 2.0)
ex("arange", 5, device=CPU)
ex("arange.start", 2, 7)
ex("arange.start_step", 0, 5, 2, dtype=F64)
ex("linspace", 0.0, 1.0, 5)
ex("eye", 4)
ex("eye.m", 4, 3)
ex("distcell.arange.default", 5, 1, 2, 0)
KEY = torch.tensor([1, 2, 3])
ex("distcell.uniform.default", KEY, 7, (4, 3))
ex("distcell.keep_mask.default", KEY, 7, 0.4, (4, 3))

# --- lists of tensors -----------------------------------------------------------------------------
LISTS = [(R(4, 3), R(5)), (P(4, 3), P(5)), (P(4, 3), P(5))]
for kind in ("List", "Scalar", "Tensor", "ScalarList"):
    other = {"List": LISTS[1], "Scalar": 2.0, "Tensor": P(), "ScalarList": (2.0, 3.0)}[kind]
    for name in ("add", "sub", "mul", "div"):
        if name != "sub" or kind in ("List", "Scalar"):
            ex(f"_foreach_{name}.{kind}", LISTS[0], other)
ex("_foreach_addcmul.Scalar _foreach_addcdiv.Scalar", *LISTS, 0.5)
ex("_foreach_addcmul.ScalarList _foreach_addcdiv.ScalarList", *LISTS, (0.5, 0.2))
ex("_foreach_lerp.Scalar", *LISTS[:2], 0.5)
ex("_foreach_lerp.List", *LISTS)
ex("_foreach_maximum.List", *LISTS[:2])
ex("_foreach_sqrt _foreach_neg _foreach_reciprocal _foreach_exp _foreach_abs", LISTS[1])
ex("_foreach_sign _foreach_zero", LISTS[0])
ex("_foreach_pow.Scalar", LISTS[0], 2)
ex("_foreach_norm.Scalar", LISTS[0])
ex("_foreach_norm.Scalar", (R(4, 3).float(), R(5).float()), 2, F64)
STEPS = (torch.ones(()), torch.ones(()))
ADAM = {
    "beta1": 0.9,
    "beta2": 0.99,
    "weight_decay": 0.1,
    "eps": 1e-8,
    "amsgrad": False,
    "maximize": False,
}
ADAM_LISTS = (LISTS[0], LISTS[0], LISTS[0], LISTS[1], (), STEPS)
ex("_fused_adam _fused_adamw", *ADAM_LISTS, lr=0.1, **ADAM)
ex("_fused_adam.tensor_lr _fused_adamw.tensor_lr", *ADAM_LISTS, lr=torch.tensor(0.1), **ADAM)
SGD = {"weight_decay": 0.1, "momentum": 0.9, "dampening": 0.0, "nesterov": False, "maximize": False}
ex("_fused_sgd", *LISTS, lr=0.1, is_first_step=False, **SGD)
ex("_fused_sgd.tensor_lr", *LISTS, lr=torch.tensor(0.1), is_first_step=False, **SGD)
ex("_local_scalar_dense", R())

UNCHECKED = {
    # their elements are not defined
    "aten.empty_like.default",
    "aten.empty.memory_format",
    "aten.new_empty.default",
    # kernels of CUDA, checked on a device
    "aten._fused_rms_norm_backward.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_flash_attention_backward.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_efficient_attention_backward.default",
    "aten._scaled_dot_product_cudnn_attention.default",
}


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    EXAMPLES,
    ids=[f"{i}-{target}" for i, (target, _, _) in enumerate(EXAMPLES)],
)
def test_a_rule_holds_however_its_factors_are_split(target, args, kwargs):
    check_rule(target, *args, **kwargs)


def test_every_op_in_the_table_has_an_example():
    known = {target for target, _, _ in EXAMPLES} | UNCHECKED
    missing = [t for t in table.targets() if t not in known and not t.startswith(("py.", "mylib."))]
    assert not missing


def test_every_op_in_the_table_can_be_executed():
    for target in table.targets():
        assert callable(table.implementation(target))


def test_every_op_that_writes_in_place_exists():
    for target in table.targets():
        inplace = table.find(target).inplace
        assert inplace is None or callable(table.torch_operator(inplace))


HALF = [
    ("aten._softmax.default", R(4, 5), 1, False),
    ("aten._log_softmax.default", R(4, 5), 1, False),
    ("aten._softmax_backward_data.default", R(4, 5), torch.softmax(R(4, 5), 1), 1, torch.bfloat16),
    ("aten.native_layer_norm.default", LN, (3,), R(3), R(3), 1e-5),
    ("aten.native_layer_norm_backward.default", R(2, 4, 3), LN, (3,), *STATS, R(3), R(3), ALL),
    ("aten.native_group_norm.default", GN, R(6), R(6), 2, 6, 3, 3, 1e-5),
    ("aten.mean.dim", R(4, 3), (1,)),
    ("aten.var_mean.correction", R(4, 3), (1,)),
    ("aten.logsumexp.default", R(4, 3), (1,)),
    ("aten.linalg_vector_norm.default", R(4, 3)),
    ("aten.linalg_vector_norm.default", R(4, 3), INF),
    ("aten.mse_loss.default", R(4, 3), R(4, 3), 1),
    ("aten.nll_loss_forward.default", NLL[0], NLL[1], None, 1, -100),
    ("aten.addmm.default", R(3), R(4, 5), R(5, 3)),
]


def as_attention(query, key, value, bias, *rest, is_causal=False, scale=None):
    """What the fused kernels of CUDA compute, for a check of their rules on any device."""
    mask = torch.ones(query.shape[2], key.shape[2]).tril().bool() if is_causal else bias
    q, k, v = (t.requires_grad_() for t in (query, key, value))
    mask = mask if mask is None or mask.dtype == torch.bool else mask.requires_grad_()
    with torch.enable_grad():
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale)
        scores = q @ k.transpose(-2, -1) * (scale or q.shape[-1] ** -0.5)
        scores = scores if bias is None else scores + bias
    return out, scores.logsumexp(-1)


def forward_kernel(query, key, value, bias, compute):
    out, lse = as_attention(query, key, value, bias)
    padded = torch.cat([lse.detach(), lse.new_zeros(*lse.shape[:2], 3)], 2)
    return out.detach(), padded, torch.tensor(1), torch.tensor(2)


def backward_kernel(grad, *args):
    given = [t for t in args[:4] if t is not None]
    made, _ = as_attention(*args[:4], is_causal=args[-1])
    return torch.autograd.grad(made, given, grad)


@pytest.mark.parametrize("shape", [None, (4, 5), (2, 1, 4, 5), (1, 3, 1, 5)])
def test_the_rules_of_attention_on_cuda_hold_for_what_its_kernels_compute(shape):
    name = "_scaled_dot_product_efficient_attention"
    forward, backward = (
        table.find(f"aten.{name}.default"),
        table.find(f"aten.{name}_backward.default"),
    )
    table.register(OpDef("mylib.attention", forward.rule, run=forward_kernel))
    table.register(OpDef("mylib.attention_backward", backward.rule, run=backward_kernel))
    bias = None if shape is None else R(*shape)
    check_rule("mylib.attention", *QKV, bias, True)
    seeds = torch.tensor(1), torch.tensor(2)
    made = forward_kernel(*(t.clone() for t in QKV), None, True)[:2]
    grads = (True, True, True, bias is not None)
    check_rule(
        "mylib.attention_backward", R(2, 3, 4, 2), *QKV, bias, *made, *seeds, 0.0, grads, False
    )


def rms_backward(grad, x, shape, *args):
    x, weight = x.requires_grad_(), args[1].requires_grad_()
    with torch.enable_grad():
        y = torch.nn.functional.rms_norm(x, shape, weight)
    return torch.autograd.grad(y, (x, weight), grad)


def test_the_gradient_of_rms_norm_on_cuda_is_lowered_rightly():
    known = table.find("aten._fused_rms_norm_backward.default")
    table.register(OpDef("mylib.rms_backward", known.rule, known.lower, rms_backward))
    rstd = of_results("_fused_rms_norm", LN, (3,), None, None)[1]
    check_rule("mylib.rms_backward", R(2, 4, 3), LN, (3,), rstd, R(3), (True, True))


@pytest.mark.parametrize(("target", "a"), [(t, a) for t, *a in HALF], ids=[t for t, *_ in HALF])
def test_a_lowering_keeps_the_dtype_in_half_precision(target, a):
    args = [x.bfloat16() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in a]
    check_rule(target, *args)


def test_a_rule_that_is_wrong_is_refused_with_every_failure():
    table.register(OpDef("mylib.cumsum", rule("n d -> n d"), run=lambda x: x.cumsum(1)))
    with pytest.raises(RuleError) as caught:
        check_rule("mylib.cumsum", R(4, 3))
    assert "n d -> n d` of mylib.cumsum does not hold" in str(caught.value)
    assert all(line.startswith(("d=", "n=")) for line in caught.value.where)
    assert any("d=3@a on a=2: result 0: differs by" in line for line in caught.value.where)
    assert not any(line.startswith("n=4@a on") for line in caught.value.where)


def test_a_claim_of_linearity_that_is_wrong_is_refused():
    of = rule("n -> n", linear=[{0}], monotone=True)
    table.register(OpDef("mylib.shift", of, run=lambda x: 1 - x))
    with pytest.raises(RuleError, match=r"linear in \[0\](.|\n)*monotone"):
        check_rule("mylib.shift", R(4))


def test_an_op_without_a_rule_cannot_be_checked_and_is_whole():
    with pytest.raises(RuleError, match=r"there is no rule for mylib\.unheard_of"):
        check_rule("mylib.unheard_of", R(4))
    call = Call(Op("mylib.unheard_of"), (Value("x", (4, 3), "f32"),), (Value("y", (4,), "f32"),))
    assert str(table.rule_of(call)) == "x0_0! x0_1! -> x1_0!"


def test_a_rule_that_does_not_fit_the_shapes_is_refused():
    table.register(OpDef("mylib.double", rule("n d -> n d"), run=lambda x: torch.cat([x, x], 1)))
    with pytest.raises(RuleError, match=r"`d` has sizes 3 and 6"):
        check_rule("mylib.double", R(4, 3))


def test_the_examples_cover_the_lowerings_and_the_claims():
    done = check_rule(
        "aten.native_layer_norm_backward.default", R(2, 4, 3), LN, (3,), *STATS, R(3), R(3), ALL
    )
    assert done.splits > 0 and done.lowerings > 0 and done.claims == 1


def test_a_rule_may_look_at_the_type_of_a_number():
    def of(call):
        return rule("n -> n" if isinstance(call.op.args[1], bool) else "n! -> n!")(call)

    table.register(OpDef("mylib.typed", of))
    x, y = Value("x", (4,), "f32"), Value("y", (4,), "f32")
    calls = [Call(Op("mylib.typed", (Ref("x"), number)), (x,), (y,)) for number in (1, True, 1.0)]
    assert [str(table.rule_of(call)) for call in calls] == ["n! -> n!", "n -> n", "n! -> n!"]
    ops = tuple(
        Op("mylib.typed", (Ref("x"), number), outputs=(name,))
        for name, number in (("y", True), ("z", 1))
    )
    values = {name: replace(x, name=name) for name in "xyz"}
    graph = Graph((Input("x", "input", "x"),), ops, (), values)
    assert [str(found) for found in table.rules_of(graph)] == ["n -> n", "n! -> n!"]


def test_results_are_inferred_by_the_type_of_a_number():
    x = Value("x", (4,), "i64")
    for number, dtype in ((1, "i64"), (1.0, "f32"), (True, "i64"), (1.0, "f32")):
        op = Op("aten.add.Scalar", (Ref("x"), number))
        assert infer_results(op, [x]) == (((4,), dtype),)


def test_results_are_inferred_by_what_an_op_is_now():
    x = Value("x", (4,), "f32")
    for wide in (False, True):
        run = torch.Tensor.double if wide else torch.Tensor.clone
        table.register(OpDef("mylib.wide", rule("n -> n"), run=run))
        assert infer_results(Op("mylib.wide", (Ref("x"),)), [x])[0][1] == ("f64" if wide else "f32")
