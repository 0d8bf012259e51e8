"""Row optimizers: settings in, rule and constants out. They run fused in the backward of EmbeddingTables.

For every row a batch touches, with g the sum of its gradients (in the order of the batch):

1. `scale_by_count`: g is divided by the number of times the row occurs.
2. `clip_norm`: g is scaled down to this Euclidean norm if it is longer.
3. `l2`: g becomes g + l2 * w, the gradient of (l2 / 2) * |w|^2.
4. `weight_decay`: w becomes w * (1 - lr * weight_decay), apart from g (decoupled, as in AdamW).
5. the rule of the optimizer.

`decay_scope="touched"` (the default) does all this for rows the batch touches and no others, so an id seen rarely decays
rarely. `decay_scope="table"` visits every row of every table at every step with g = 0 where the batch has no gradient:
exactly what a dense torch optimizer does, at a cost that grows with the table; right for small tables only.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hotbed.errors import ConfigError
from hotbed.optim import rules
from hotbed.optim.schedules import Schedule, as_schedule

DecayScope = Literal["touched", "table"]


@dataclass(frozen=True, kw_only=True)
class RowOptimizer:
    """What all row optimizers share; see the module for the order in which the settings act."""

    rule: ClassVar[rules.Rule]

    lr: float | Schedule
    l2: float = 0.0
    weight_decay: float = 0.0
    decay_scope: DecayScope = "touched"
    clip_norm: float = 0.0  # 0 is off
    scale_by_count: bool = False

    def __post_init__(self) -> None:
        wrong = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type not in ("float", "float | Schedule") or isinstance(value, Schedule):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                wrong.append(f"{field.name} must be a finite number >= 0, not {value!r}")
        if self.decay_scope not in ("touched", "table"):
            wrong.append(f"decay_scope must be 'touched' or 'table', not {self.decay_scope!r}")
        if wrong:
            raise ConfigError(f"{type(self).__name__}: " + "; ".join(wrong))

    def rate(self, step: int) -> float:
        """The learning rate of update number `step`, counted from 0."""
        return as_schedule(self.lr).at(step)

    def constants(self) -> tuple[float, ...]:
        """The `h` of the rule."""
        return ()

    def first_constants(self) -> tuple[float, float, float]:
        """The `f` of the rule's `first`."""
        return (0.0, 0.0, 0.0)

    def first_state(self, weights: Tensor) -> dict[str, Tensor]:
        """The state of rows that were never updated, from their weights [rows, D]."""
        f = tuple(weights.new_tensor(value) for value in self.first_constants())
        element_states = zip(self.rule.element_states, self.rule.bind_first({"where": torch.where})(weights, f))
        return dict(element_states) | dict.fromkeys(self.rule.row_states, f[2])


@dataclass(frozen=True, kw_only=True)
class SGD(RowOptimizer):
    """w - lr * g."""

    rule: ClassVar[rules.Rule] = rules.SGD_RULE
    lr: float | Schedule = 0.1


@dataclass(frozen=True, kw_only=True)
class Adagrad(RowOptimizer):
    """w - lr * g / (sqrt(sum of g^2) + eps), one sum per weight (Duchi et al. 2011)."""

    rule: ClassVar[rules.Rule] = rules.ADAGRAD_RULE
    lr: float | Schedule = 0.05
    eps: float = 1e-8
    initial_sum: float = 0.0

    def constants(self) -> tuple[float, ...]:
        return (self.eps,)

    def first_constants(self) -> tuple[float, float, float]:
        return (self.initial_sum, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class RowwiseAdagrad(RowOptimizer):
    """Adagrad with one sum per row, of the mean square of its gradient: state of one number instead of D."""

    rule: ClassVar[rules.Rule] = rules.ROWWISE_ADAGRAD_RULE
    lr: float | Schedule = 0.05
    eps: float = 1e-8
    initial_sum: float = 0.0

    def constants(self) -> tuple[float, ...]:
        return (self.eps,)

    def first_constants(self) -> tuple[float, float, float]:
        return (0.0, 0.0, self.initial_sum)


@dataclass(frozen=True, kw_only=True)
class Adam(RowOptimizer):
    """Lazy Adam: moments and bias correction advance only when a row is touched, by the row's own step (kept per row)."""

    rule: ClassVar[rules.Rule] = rules.ADAM_RULE
    lr: float | Schedule = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta1 >= 1 or self.beta2 >= 1:
            raise ConfigError(f"Adam: beta1 and beta2 must be below 1, not {self.beta1!r} and {self.beta2!r}")

    def constants(self) -> tuple[float, ...]:
        logs = (math.log2(beta) if beta > 0 else -math.inf for beta in (self.beta1, self.beta2))
        return (self.eps, self.beta1, 1.0 - self.beta1, self.beta2, 1.0 - self.beta2, *logs)


@dataclass(frozen=True, kw_only=True)
class FTRL(RowOptimizer):
    """FTRL-Proximal (McMahan et al. 2013) with lr as its alpha; l1 makes weights exactly zero.

    z starts where the initial value of a row is the rule's own solution, so that the first update moves the row from there
    instead of forgetting it. While lr is 0, rows and their state stay as they are.
    """

    rule: ClassVar[rules.Rule] = rules.FTRL_RULE
    lr: float | Schedule = 0.05
    beta: float = 1.0
    l1: float = 0.0
    ridge: float = 0.0  # the lambda2 of the paper

    def constants(self) -> tuple[float, ...]:
        return (self.beta, self.l1, self.ridge)

    def first_constants(self) -> tuple[float, float, float]:
        rate = self.rate(0)
        if rate <= 0:
            raise ConfigError(f"FTRL: lr must be above 0 at the first step, not {rate!r}")
        return (-(self.beta / rate + self.ridge), self.l1, 0.0)


ROW_OPTIMIZERS: dict[str, type[RowOptimizer]] = {
    kind.rule.name: kind for kind in (SGD, Adagrad, RowwiseAdagrad, Adam, FTRL)
}


def row_optimizer(name: str, **settings: Any) -> RowOptimizer:
    """A row optimizer by name, with a ConfigError that lists what exists."""
    if name not in ROW_OPTIMIZERS:
        raise ConfigError(f"no row optimizer {name!r}; there are {', '.join(sorted(ROW_OPTIMIZERS))}")
    kind = ROW_OPTIMIZERS[name]
    known = {field.name for field in dataclasses.fields(kind)}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise ConfigError(f"{name} has no setting {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    return kind(**settings)
