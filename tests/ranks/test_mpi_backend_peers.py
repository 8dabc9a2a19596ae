"""What torch builds on process groups gives over MPI what it gives over gloo.

Each job runs once over each backend, in the same processes. Run on 2 and on 4 ranks.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import distcell.runtime.mpi  # noqa: F401 (registers the backend)

pytestmark = [pytest.mark.slow]

Job = Callable[[], list[Tensor]]

STEPS = 3

_kept: list[object] = []


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about itself
        yield


def over(backend: str, job: Job) -> list[Tensor]:
    torch.manual_seed(0)
    dist.init_process_group(backend)
    if backend == "gloo":  # its own thread may drop it last, and cannot join itself
        _kept.append(dist.group.WORLD)
    try:
        return [result.detach().clone() for result in job()]
    finally:
        dist.destroy_process_group()


def assert_equal_over_both(job: Job, *, tolerance: float = 1e-5) -> list[Tensor]:
    got, want = over("mpi4py", job), over("gloo", job)
    assert len(got) == len(want) and got
    largest = max(float(other.abs().max()) for other in want if other.numel())
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert torch.isfinite(one).all()
        assert not one.numel() or float((one - other).abs().max()) <= tolerance * largest
    return got


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(8, 16, bias=False),
        nn.BatchNorm1d(16),
        nn.GELU(),
        nn.Linear(16, 12),
        nn.Linear(12, 4),
    )


def batch(step: int, member: int, rows: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + member)
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 4, generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, member: int) -> list[Tensor]:
    losses = []
    for step in range(STEPS):
        x, y = batch(step, member)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def weights(model: nn.Module) -> list[Tensor]:
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]


# DistributedDataParallel ------------------------------------------------------------------------


def ddp(**options: Any) -> Job:
    def job() -> list[Tensor]:
        model = DistributedDataParallel(make_model(), bucket_cap_mb=0.001, **options)
        losses = train(model, torch.optim.Adam(model.parameters(), eps=1e-5), rank())
        return [*losses, *weights(model)]

    return job


def hooked(hook: str, bucket_cap_mb: float | None = None) -> Job:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    def job() -> list[Tensor]:
        # Several buckets of PowerSGD hang gloo now and then: callbacks overtake each other.
        cap = None if hook == "PowerSGD" else 0.001
        model = DistributedDataParallel(make_model(), bucket_cap_mb=bucket_cap_mb or cap)
        if hook == "PowerSGD":
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5
            )
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            compress = getattr(default_hooks, hook)

            def by_another_name(state, bucket):
                return compress(state, bucket)  # torch knows by its name which hook wants NCCL

            model.register_comm_hook(None, by_another_name)
        losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank())
        return [*losses, *weights(model)]

    return job


def accumulated() -> list[Tensor]:
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        with model.no_sync():
            x, y = batch(2 * step, rank())
            nn.functional.mse_loss(model(x), y).backward()
        x, y = batch(2 * step + 1, rank())
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def joined() -> list[Tensor]:
    from torch.distributed.algorithms.join import Join

    model = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for step in range(2 + rank()):
            x, y = batch(step, rank())
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return weights(model)


def sparse_gradients() -> list[Tensor]:
    torch.manual_seed(1)
    table = nn.Embedding(10, 4, sparse=True)
    model = DistributedDataParallel(nn.Sequential(table, nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        model(torch.tensor([rank(), step, rank() + step])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


DDP_JOBS: dict[str, Callable[[], Job]] = {
    "plain": ddp,
    "views of the buckets": lambda: ddp(gradient_as_bucket_view=True),
    "unused parameters": lambda: ddp(find_unused_parameters=True),
    "a static graph": lambda: ddp(static_graph=True),
    "no_sync": lambda: accumulated,
    "join": lambda: joined,
    "sparse gradients": lambda: sparse_gradients,
    "all-reduce hook": lambda: hooked("allreduce_hook"),
    "fp16 hook": lambda: hooked("fp16_compress_hook"),
    "bf16 hook": lambda: hooked("bf16_compress_hook"),
    "PowerSGD hook": lambda: hooked("PowerSGD"),
}


COVERED_BY_OTHERS = ["views of the buckets", "unused parameters", "a static graph"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if name in COVERED_BY_OTHERS else [])
        for name in DDP_JOBS
    ],
)
def test_ddp(name: str) -> None:
    tolerance = {"fp16 hook": 2e-3, "bf16 hook": 2e-2}.get(name, 1e-5)
    assert_equal_over_both(DDP_JOBS[name](), tolerance=tolerance)


def test_powersgd_on_several_buckets_gives_all_ranks_the_same() -> None:
    def job() -> list[Tensor]:
        found = hooked("PowerSGD", bucket_cap_mb=0.001)()[STEPS:]
        for weight in found:
            every = [torch.empty_like(weight) for _ in range(size())]
            dist.all_gather(every, weight)
            assert all(torch.equal(other, weight) for other in every)
        return found

    over("mpi4py", job)


def test_ddp_equals_one_process() -> None:
    def job() -> list[Tensor]:
        torch.manual_seed(1)
        model = DistributedDataParallel(nn.Linear(8, 4))
        alone = copy.deepcopy(model.module)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank())
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            parts = [batch(step, member) for member in range(size())]
            x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            nn.functional.mse_loss(alone(x), y).backward()
            optimizer.step()
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one, other)
        return weights(alone)

    over("mpi4py", job)


def test_zero_redundancy_optimizer() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def job() -> list[Tensor]:
        model = DistributedDataParallel(make_model())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2, eps=1e-5)
        losses = train(model, optimizer, rank())
        optimizer.consolidate_state_dict(0)
        return [*losses, *weights(model)]

    assert_equal_over_both(job)


# FSDP2 and DTensor ------------------------------------------------------------------------------


def sharded(mesh_shape: tuple[int, ...], **options: Any) -> Job:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def job() -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 12), nn.Linear(12, 4))
        names = ("replicate", "shard")[-len(mesh_shape) :]
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
        losses = train(model, torch.optim.Adam(model.parameters(), eps=1e-5), rank())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        return [*losses, *weights(model), norm]

    return job


def ranks() -> int:
    from mpi4py import MPI

    return MPI.COMM_WORLD.Get_size()


def test_fsdp2() -> None:
    assert_equal_over_both(sharded((ranks(),)))


def test_fsdp2_in_bf16() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert_equal_over_both(sharded((ranks(),), mp_policy=policy), tolerance=2e-2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    assert_equal_over_both(sharded((ranks(),), mp_policy=policy), tolerance=2e-2)


def test_fsdp2_with_replicas() -> None:
    if ranks() % 2:
        return
    assert_equal_over_both(sharded((ranks() // 2, 2)))


def test_tensor_and_sequence_parallel_modules() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    def job() -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        alone = copy.deepcopy(model)
        mesh = init_device_mesh("cpu", (size(),), mesh_dim_names=("tp",))
        plan = {
            "0": SequenceParallel(),
            "1": ColwiseParallel(input_layouts=Shard(1)),
            "3": RowwiseParallel(output_layouts=Shard(1)),
        }
        model = parallelize_module(model, mesh, plan)
        x = batch(0, 0, rows=4 * size())[0].view(1, -1, 8)
        model(x.chunk(size(), 1)[rank()]).pow(2).sum().backward()
        alone(x).pow(2).sum().backward()
        gradients = [p.grad.full_tensor() for p in model.parameters()]
        for one, other in zip(gradients, alone.parameters(), strict=True):
            torch.testing.assert_close(one, other.grad, rtol=1e-4, atol=1e-4)
        return gradients

    assert_equal_over_both(job)


def test_dtensors_are_redistributed() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    def job() -> list[Tensor]:
        mesh = init_device_mesh("cpu", (size(),))
        whole = torch.arange(7.0 * 5).view(7, 5)  # uneven
        x = distribute_tensor(whole, mesh, [Shard(0)])
        moved = x.redistribute(mesh, [Shard(1)])
        product = x.redistribute(mesh, [Shard(1)]) @ distribute_tensor(whole.t(), mesh, [Shard(0)])
        assert product.placements == (Partial(),)
        return [
            moved.to_local(),
            moved.redistribute(mesh, [Replicate()]).to_local(),
            product.full_tensor(),
            product.redistribute(mesh, [Shard(0)]).to_local(),
        ]

    assert_equal_over_both(job)


# Pipelines --------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_pipelining(schedule: str) -> None:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    def job() -> list[Tensor]:
        torch.manual_seed(1)
        chunks = 2 if schedule.startswith("Interleaved") else 1
        layers = [nn.Linear(8, 8) for _ in range(size() * chunks)]
        alone = nn.Sequential(*copy.deepcopy(layers))
        mine = range(rank(), len(layers), size())
        stages = [PipelineStage(layers[i], i, len(layers), torch.device("cpu")) for i in mine]
        kind = get_schedule_class(schedule)
        run = kind(
            stages if chunks > 1 else stages[0],
            n_microbatches=2 * size(),
            loss_fn=nn.functional.mse_loss,
        )
        x = batch(0, 0, rows=4 * size())[0]
        y = torch.zeros_like(x)
        losses: list[Tensor] = []
        first, last = rank() == 0, rank() == size() - 1
        run.step(*([x] if first else []), **({"target": y, "losses": losses} if last else {}))
        want = nn.functional.mse_loss(alone(x), y)
        want.backward()
        if last:
            torch.testing.assert_close(torch.stack(losses).mean(), want)
        gradients = [layers[i].weight.grad for i in mine]
        for i, gradient in zip(mine, gradients, strict=True):
            torch.testing.assert_close(gradient, alone[i].weight.grad, rtol=1e-4, atol=1e-6)
        return gradients

    assert_equal_over_both(job)


# Checkpoints ------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_distributed_checkpoints(asynchronous: bool) -> None:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    def job() -> list[Tensor]:
        torch.manual_seed(1)
        model = fully_shard(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)))
        folder = [tempfile.mkdtemp() if rank() == 0 else ""]
        dist.broadcast_object_list(folder, 0)
        state = get_model_state_dict(model)
        if asynchronous:
            dcp.async_save(state, checkpoint_id=folder[0]).result()
        else:
            dcp.save(state, checkpoint_id=folder[0])
        want = weights(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        dcp.load(state, checkpoint_id=folder[0])
        model.load_state_dict(state)
        dist.barrier()
        assert (Path(folder[0]) / ".metadata").is_file()
        got = weights(model)
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
        return got

    assert_equal_over_both(job)


# Functional collectives -------------------------------------------------------------------------


def functional(run: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Job:
    from torch.distributed import _functional_collectives as funcol

    def job() -> list[Tensor]:
        group = dist.group.WORLD
        ranks_, here = list(range(size())), rank()
        after = [(r + 1) % size() for r in ranks_]
        sizes = [2] * size()

        def body(x: Tensor) -> list[Tensor]:
            return [
                funcol.all_reduce(x, "sum", group),
                funcol.all_reduce(x, "avg", group) if dist.get_backend() != "gloo" else x * 0,
                funcol.all_gather_tensor(x, 0, group),
                funcol.all_gather_tensor(x, 1, group),
                funcol.reduce_scatter_tensor(x, "sum", 0, group),
                funcol.all_to_all_single(x, sizes, sizes, group),
                funcol.broadcast(x, 0, group),
                *funcol.all_reduce_coalesced([x, 2 * x], "sum", group),
                *funcol.all_gather_into_tensor_coalesced([x, 2 * x], group),
                *funcol.reduce_scatter_tensor_coalesced([x, 2 * x], "sum", [0, 0], group),
                funcol.permute_tensor(x.flatten(), after, group),
            ]

        x = batch(0, here, rows=2 * size())[0]
        found = [out + 0 for out in run(body)(x)]
        found[1] = found[1] * 0 if dist.get_backend() == "gloo" else found[1] - found[0] / size()
        return found

    return job


def test_functional_collectives() -> None:
    assert_equal_over_both(functional(lambda body: body))


@pytest.mark.full
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_functional_collectives_compiled(backend: str) -> None:
    assert_equal_over_both(
        functional(lambda body: torch.compile(body, backend=backend, fullgraph=True))
    )


def test_functional_collectives_differentiate() -> None:
    from torch.distributed import _functional_collectives as funcol
    from torch.distributed import nn as dist_nn

    def job() -> list[Tensor]:
        group = dist.group.WORLD
        x = batch(0, rank(), rows=2 * size())[0].requires_grad_()
        gathered = funcol.all_gather_tensor_autograd(x, 0, group)
        scattered = funcol.reduce_scatter_tensor_autograd(x, "sum", 0, group)
        sizes = [2] * size()
        exchanged = funcol.all_to_all_single_autograd(x, sizes, sizes, group)
        reduced = dist_nn.functional.all_reduce(x * x, group=group)
        scale = torch.arange(1.0, 9.0)
        total = sum((out * scale).sum() for out in (gathered, scattered, exchanged, reduced))
        total.backward()
        return [total, x.grad]

    assert_equal_over_both(job)


@pytest.mark.full
def test_a_compiled_ddp_step() -> None:
    def job() -> list[Tensor]:
        torch._dynamo.reset()
        model = DistributedDataParallel(torch.compile(make_model(), backend="aot_eager"))
        losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank())
        return [*losses, *weights(model)]

    assert_equal_over_both(job)
