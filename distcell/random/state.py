"""What the random numbers of a call depend on besides the place: seed, step and micro-step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from distcell.compat import replay_checkpoints
from distcell.errors import CheckpointError


@dataclass
class RandomState:
    """Seed, step and micro-step, from which the keys of calls are made.

    Args:
        seed: As given; None takes what `torch.manual_seed` was last called with.
        step: How many optimizer steps were made.
        micro: How many outermost calls in training were made since.
        draws: How many outermost calls were made since that were not in training; counted apart,
            so that an evaluation between two steps does not change the training.

    Example:
        >>> state = RandomState(seed=3)
        >>> state.next_key(), state.next_key()
        (tensor([3, 0, 0]), tensor([3, 0, 1]))
        >>> state.optimizer_stepped()
        >>> state.next_key()
        tensor([3, 1, 0])
    """

    seed: int | None = None
    step: int = 0
    micro: int = 0
    draws: int = 0

    def next_key(self, *, training: bool = True) -> torch.Tensor:
        """The key of the outermost call that begins: int64[3] in the host's memory.

        Args:
            training: Whether the network is in training mode.
        """
        if training:
            self.micro += 1
            micro = self.micro - 1
        else:
            self.draws += 1
            micro = -self.draws
        seed = torch.initial_seed() if self.seed is None else self.seed
        signed = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
        return torch.tensor([signed, self.step, micro], dtype=torch.int64, device="cpu")

    @contextmanager
    def outermost_call(self, *, training: bool = True) -> Iterator[torch.Tensor]:
        """A context with the key of an outermost call; a call that fails is not counted.

        So a script that skips a batch which it cannot use draws the same numbers on one device,
        where the call fails half-way, as under a plan, where it is never begun.
        """
        before = self.micro, self.draws
        try:
            yield self.next_key(training=training)
        except BaseException:
            self.micro, self.draws = before
            raise

    def optimizer_stepped(self) -> None:
        """Counts an optimizer step. torch's optimizers are counted without this call."""
        self.step += 1
        self.micro = self.draws = 0

    def restart(self, seed: int | None) -> None:
        """Begins anew with a seed."""
        self.seed, self.step, self.micro, self.draws = seed, 0, 0, 0

    def state_dict(self) -> dict[str, int | None]:
        """What a checkpoint must hold, so that training goes on with the same numbers."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave.

        Raises:
            CheckpointError: When it is not of that form.
        """
        counts = [state.get(name) for name in ("step", "micro", "draws")]
        seed = state.get("seed")
        if set(state) != set(asdict(self)) or not all(isinstance(item, int) for item in counts):
            raise CheckpointError(
                f"not a state of random numbers: {dict(state)}",
                hint="it has the integers seed, step, micro and draws",
            )
        self.seed = None if seed is None else int(seed)
        self.step, self.micro, self.draws = (int(item) for item in counts if item is not None)

    @contextmanager
    def held(self) -> Iterator[None]:
        """A context after which everything is as before: for steps that are traced, not made."""
        before = asdict(self)
        try:
            yield
        finally:
            self.__dict__.update(before)


_state = RandomState()


def current_state() -> RandomState:
    """The random state of this process.

    Example:
        >>> current_state() is current_state()
        True
    """
    return _state


def seed(number: int | None) -> None:
    """Begins the random numbers of this process anew.

    Args:
        number: The seed. None: what `torch.manual_seed` was last called with.

    Example:
        >>> seed(7)
        >>> current_state().next_key()
        tensor([7, 0, 0])
        >>> seed(None)
    """
    _state.restart(number)


def _replay(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as a checkpoint must run it again: with the numbers that it draws first."""
    began = asdict(_state)

    def again(*args: Any, **kwargs: Any) -> Any:
        with _state.held():
            _state.__dict__.update(began)
            return function(*args, **kwargs)

    return again


replay_checkpoints(_replay)
register_optimizer_step_post_hook(lambda *_: _state.optimizer_stepped())
