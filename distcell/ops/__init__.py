"""Functions on tensors: MindSpore's names over torch's own."""

from distcell.ops.functional import add as add
from distcell.ops.functional import bmm as bmm
from distcell.ops.functional import cat as cat
from distcell.ops.functional import cross_entropy as cross_entropy
from distcell.ops.functional import dense as dense
from distcell.ops.functional import dropout as dropout
from distcell.ops.functional import exp as exp
from distcell.ops.functional import gelu as gelu
from distcell.ops.functional import layer_norm as layer_norm
from distcell.ops.functional import log_softmax as log_softmax
from distcell.ops.functional import matmul as matmul
from distcell.ops.functional import mean as mean
from distcell.ops.functional import mse_loss as mse_loss
from distcell.ops.functional import mul as mul
from distcell.ops.functional import relu as relu
from distcell.ops.functional import reshape as reshape
from distcell.ops.functional import sigmoid as sigmoid
from distcell.ops.functional import silu as silu
from distcell.ops.functional import softmax as softmax
from distcell.ops.functional import stack as stack
from distcell.ops.functional import sub as sub
from distcell.ops.functional import sum as sum
from distcell.ops.functional import tanh as tanh
from distcell.ops.functional import transpose as transpose
