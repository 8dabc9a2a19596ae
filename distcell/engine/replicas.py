"""How many parts a batch is split into: what `gradients_mean=False` multiplies gradients by."""

from __future__ import annotations

from distcell.errors import StrategyError
from distcell.mesh import Mesh
from distcell.strategy.strategy import Strategy


def replicas_of(strategy: Strategy, mesh: Mesh) -> int:
    """The size of the axes by which the strategy splits the first dim of an input.

    Args:
        strategy: Of several inputs the one in the most parts counts.
        mesh: Gives the axes their sizes.

    Raises:
        StrategyError: On more than one rank: it splits no batch, or by a number of slices whose
            axes are found later.

    Example:
        >>> from distcell.strategy import load_strategy
        >>> replicas_of(load_strategy("data"), Mesh.parse("dp=4"))
        4
    """
    batches = [spec.dims[0] for _, spec in strategy.inputs if spec.dims]
    if mesh.size > 1 and not any(dim.axes for dim in batches):
        raise StrategyError(
            "`gradients_mean=False` multiplies gradients by the parts of the batch, "
            "and the strategy names no axes that split one",
            where=[strategy.source],
            hint='name them under `inputs:`, like `inputs: {"*": [dp]}`',
        )
    return max((mesh.extent(dim.axes) for dim in batches), default=1)
