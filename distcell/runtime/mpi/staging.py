"""Contiguous memory of the host that stands for the tensors of a collective while it runs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from distcell.errors import BackendError


class Staging:
    """Stand-ins for the tensors of one collective; a contiguous CPU tensor stands for itself.

    A CUDA tensor is copied to pinned memory on the stream that is current when it is asked for.
    """

    def __init__(self) -> None:
        self._back: list[tuple[Tensor, Tensor]] = []
        self._copied: list[torch.cuda.Event] = []

    def source(self, tensor: Tensor) -> Tensor:
        """Returns memory with the tensor's values, not to be written to."""
        tensor = _checked(tensor)
        return tensor if _fits(tensor) else self._filled(tensor)

    def target(self, tensor: Tensor) -> Tensor:
        """Returns memory with any values; those that it gets are the tensor's in the end."""
        tensor = _checked(tensor)
        if _fits(tensor):
            return tensor
        host = _host_like(tensor)
        self._back.append((tensor, host))
        return host

    def both(self, tensor: Tensor) -> Tensor:
        """Returns memory with the tensor's values; those that it gets are the tensor's."""
        tensor = _checked(tensor)
        if _fits(tensor):
            return tensor
        host = self._filled(tensor)
        self._back.append((tensor, host))
        return host

    def around(self, body: Callable[[], None]) -> Callable[[], None]:
        """Returns what runs a collective on the stand-ins and brings its results back."""
        if not self._back and not self._copied:
            return body
        streams = {
            tensor.device: torch.cuda.current_stream(tensor.device)
            for tensor, _ in self._back
            if tensor.is_cuda
        }

        def run() -> None:
            for event in self._copied:
                event.synchronize()
            body()
            self.bring_back(streams)

        return run

    def bring_back(self, streams: dict[torch.device, torch.cuda.Stream]) -> None:
        """Copies the results into the tensors, on these streams, and waits for that."""
        for tensor, host in self._back:
            if tensor.is_cuda:
                with torch.cuda.stream(streams[tensor.device]):
                    tensor.copy_(host, non_blocking=True)
            else:
                tensor.copy_(host)
        for stream in streams.values():
            stream.synchronize()

    def _filled(self, tensor: Tensor) -> Tensor:
        host = _host_like(tensor)
        host.copy_(tensor, non_blocking=tensor.is_cuda)
        if tensor.is_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(tensor.device))
            self._copied.append(event)
        return host


def _fits(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def _checked(tensor: Tensor) -> Tensor:
    if tensor.device.type not in ("cpu", "cuda") or tensor.layout != torch.strided:
        raise BackendError(
            f"the mpi4py backend got a {tensor.layout} tensor on {tensor.device}",
            hint="dense tensors on cpu or cuda; sparse ones are only all-reduced",
        )
    # Always: autograd may make the tensor part of a graph before the collective has run.
    return tensor.detach()


def _host_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
