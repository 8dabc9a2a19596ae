"""One step on each rank, started by `distcell.launch`; notes when all have made it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import distcell as dc
from benchmarks.model import LEARNING_RATE, SMALL, Size, make_batches, make_gpt
from distcell.mesh import Mesh
from distcell.runtime.world import collectives_for, current_world


def main(layers: int, file: Path) -> None:
    world = current_world()
    size = SMALL if layers == SMALL.layers else Size(layers=layers)
    net = dc.parallelize(make_gpt(size))
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    dc.compile_step(net, None, optimizer)(*make_batches(size, 8)[0])
    collectives_for(Mesh((("rank", world.size),))).barrier()
    if world.rank == 0:
        file.write_text(str(time.time()), encoding="ascii")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
