"""Random draws of a loader: noticed in the thread that reads ahead, before they happen.

A loader that draws from torch's global generator shares it with training (dropout, say). Read ahead, its draws would come in
between those of training in another order every run. So the reader asks before each draw. Draws from a generator of the
loader's own do not matter, nor do those of a DataLoader's worker processes.

Calls of torch are noticed by a function mode, which is of one thread: 1.2 us a call, where a dispatch mode takes 4.5. Functions
that torch has written in Python are looked into with the latter.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Of torch's own operators; a test compares them with those that torch marks.
# fmt: off
RANDOM_OPERATORS = frozenset((
    "alpha_dropout", "alpha_dropout_", "bernoulli", "bernoulli_", "binomial", "cauchy", "cauchy_", "dropout",
    "dropout_", "exponential", "exponential_", "feature_alpha_dropout", "feature_alpha_dropout_", "feature_dropout",
    "feature_dropout_", "geometric", "geometric_", "gru", "log_normal", "log_normal_", "lstm", "multinomial",
    "native_dropout", "normal", "normal_", "normal_functional", "poisson", "rand", "rand_like", "randint",
    "randint_like", "randn", "randn_like", "random", "random_", "randperm", "rnn_relu", "rnn_tanh", "rrelu", "rrelu_",
    "rrelu_with_noise", "rrelu_with_noise_", "rrelu_with_noise_functional", "scaled_dot_product_attention", "uniform",
    "uniform_",
))
# fmt: on


class DrawGuard(TorchFunctionMode):
    """Calls `ask` before every draw from a global generator; entered by the thread that reads, around the loader's own code."""

    def __init__(self, ask: Callable[[], None]) -> None:
        super().__init__()
        self._ask = ask
        self._inside = _Operators(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, FunctionType):
            with self._inside:
                return func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in RANDOM_OPERATORS:
            self.ask_for(kwargs)
        return func(*args, **kwargs) if kwargs else func(*args)

    def ask_for(self, kwargs: Any) -> None:
        """Ask, if a call with these arguments draws from a global generator."""
        generator = kwargs.get("generator") if kwargs else None
        if generator is None or generator is torch.default_generator:
            self._ask()


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The same for every operator that runs."""

    def __init__(self, guard: DrawGuard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._guard = guard

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._guard.ask_for(kwargs)
        return func(*args, **(kwargs or {}))
