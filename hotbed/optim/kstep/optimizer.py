"""k-step Adam for dense weights: every rank makes local steps, all ranks merge their weights every k steps.

Traffic falls as 1 / k. The price is that the ranks hold different weights between merges, an approximation that docs/kstep.md
gives in formulas and measures. k = 1 is synchronous training: gradients are averaged before each step. Without a process group
it is the plain inner optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from hotbed.errors import ConfigError
from hotbed.optim.kstep.flat import FlatWeights
from hotbed.optim.kstep.merge import (
    MERGE_RULES,
    SHARING,
    AllRanks,
    LocalState,
    MergeCounts,
    Merger,
    MergeRule,
    MomentDecay,
    Over,
    RankGroup,
)

COUNTS, ARRIVING = "kstep_counts", "kstep_arriving"  # in the state of the first parameter


class KStepAdam(Optimizer):
    """Local steps of Adam, AdamW or SGD, merged over all ranks every `k` steps and by `merge()`.

    Call `merge()` at the end of an epoch and before every evaluation and checkpoint: after it all ranks hold the same bits.
    All ranks build it, step and merge together; they start from the weights of rank 0. A rank without samples takes part
    with `step(weight=0)`. Parameters become views of one flat tensor.

    Args:
        params: parameters, or param groups with their own lr, betas, eps, weight_decay, momentum.
        lr: learning rate.
        k: steps between merges; 1 averages gradients before every step instead.
        merge: what is merged in addition to the weights: the second moment, whose last mean all ranks divide by until the next
            one ("frozen_v"); the same, as a floor under every rank's own ("shared_v"); both moments ("moments");
            or nothing ("params"). None: "frozen_v", for "sgd" "params".
        inner: the local rule.
        mesh: a `hotbed.parallel.mesh.Mesh`, which sends less between nodes; without one all ranks are equals.
        across_only: average gradients inside each node every step, and merge across nodes every k.
        overlap: let a merge overlap with the next `delay` steps instead of waiting for it.
        scale_lr: between merges, multiply the steps of Adam and AdamW by the square root of the number of ranks (of nodes
            with across_only). Local gradients are noisier than their mean, so local Adam takes smaller steps; with it
            an lr that suits synchronous training stays right.
        delay: steps between the start of a merge and its use, at most k; k // 4 and at least 1 when None.
        betas: of Adam.
        eps: of Adam.
        weight_decay: added to the gradient; "adamw" shrinks the weights instead.
        momentum: of "sgd".
        buffers: running statistics that a merge averages too. Integers among them are not changed.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        k: int = 16,
        merge: MergeRule | None = None,
        inner: Literal["adam", "adamw", "sgd"] = "adam",
        mesh: RankGroup | None = None,
        across_only: bool = False,
        scale_lr: bool = True,
        overlap: bool = True,
        delay: int | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        buffers: Iterable[Tensor] = (),
    ) -> None:
        delay = max(1, k // 4) if delay is None else delay
        merge = merge or ("params" if inner == "sgd" else "frozen_v")
        _check_settings(k, merge, inner, delay)
        if across_only and mesh is None:
            raise ConfigError("across_only=True needs to know the nodes; give mesh=Mesh.from_environment()")
        self._flat: FlatWeights | None = None
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "momentum": momentum})
        self.k, self.inner = k, inner
        ranks = mesh.apart() if mesh is not None else AllRanks()
        self._averaging = ranks if k == 1 and ranks.size > 1 else None  # gradients, every step
        self._over: Over = "all"
        if ranks.size > 1 and k > 1 and (across_only or merge == "frozen_v"):
            self._other_sums = ranks.apart()  # pending merges must not mix with other sums
            if across_only:
                self._averaging, self._over = self._other_sums, "node"
        self._flat = flat = FlatWeights(self.param_groups, [one for one in buffers if one.is_floating_point()])
        self._gradients = torch.zeros_like(flat.values[: flat.num_weights])
        self._local = self._make_local(flat, shared=merge in SHARING and k > 1 and ranks.size > 1)
        # Averaged gradients keep all but the running statistics equal.
        merged = self._local if k > 1 else LocalState(flat.values[flat.num_weights :], *(self._gradients[:0],) * 3)
        self._merger = Merger(
            merged, ranks, merge if k > 1 else "params", k if k > 1 else 0, delay if overlap and k > 1 else 0
        )
        num_apart = 1 if k == 1 else ranks.size // (mesh.local if mesh is not None and across_only else 1)
        self._scale = num_apart**0.5 if scale_lr else 1.0
        ranks.broadcast_(flat.values)

    def _make_local(self, flat: FlatWeights, shared: bool) -> LocalState:
        weights = flat.values[: flat.num_weights]
        has_m = self.inner != "sgd" or any(group["momentum"] for group in self.param_groups)
        wanted = (has_m, self.inner != "sgd", shared)
        local = LocalState(flat.values, *(torch.zeros_like(weights) if one else weights[:0] for one in wanted))
        names = (
            "momentum_buffer" if self.inner == "sgd" else "exp_avg",
            "exp_avg_sq",
            "max_exp_avg_sq",
        )  # the names of torch
        for name, moment in zip(names, local[1:]):
            if moment.numel():
                for parameter, view in zip(flat.parameters, flat.views(moment)):
                    self.state[parameter][name] = view
        return local

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, weight: float = 1.0) -> Any:
        """One local step, and the part of a merge that is due. `weight` is this rank's weight in means, e.g. its samples."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if weight < 0:
            raise ConfigError(f"a step's weight is a number of samples or the like, at least 0; given: {weight}")
        flat = self._weights()
        flat.collect_gradients(self._gradients)
        step = self._merger.begin_step(weight)
        if self._averaging is not None:
            self._average_gradients(weight, self._averaging)
        squares = self._average_both(weight) if self._merger.knows_no_v else None
        averaged = self._averaging is not None or squares is not None
        moves = weight > 0 or averaged
        for group, place in flat.runs(with_gradient=not averaged) if moves else ():
            x, m, v, _ = (one[place] for one in self._local)
            square = None if squares is None else squares[place]
            shared = self._merger.shared_v(place, group["betas"][1])
            frozen = self._merger.rule == "frozen_v"
            run = RunState(x, self._gradients[place], m, v, square, shared, frozen, self._scale)
            INNER[self.inner](run, group, step)
        self._merger.end_step(self._decays, moved=moves)
        return loss

    def merge(self, *, moments: bool = False) -> None:
        """Wait for a pending mean, then merge: all ranks hold the same weights. Does nothing right after a merge.

        With `moments` the moments are averaged too, whatever the rule: all ranks then have the same state, for a checkpoint
        that another number of ranks may load.
        """
        with torch.no_grad():
            self._weights()
            self._merger.merge(self._decays, moments=moments and self.k > 1)

    def state_dict(self) -> dict[str, Any]:
        """This rank's moments under the names of torch.optim, counts, and a pending mean, which is waited for.

        Tensors and plain values only. The model saves the weights. Every rank has its own state; after
        `merge(moments=True)` they are equal.
        """
        self._weights()
        packed = super().state_dict()
        numbers = [number for group in packed["param_groups"] for number in group["params"]]
        step = torch.tensor(float(self._merger.counts.step), dtype=torch.float32, device="cpu")
        packed["state"] = {number: {"step": step, **packed["state"].get(number, {})} for number in numbers}
        packed["state"][numbers[0]][COUNTS] = self._merger.counts.as_tensor()
        arriving = self._merger.arriving()
        if arriving is not None:
            packed["state"][numbers[0]][ARRIVING] = arriving
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume bit for bit from a `state_dict` of this rank, or start from one of torch.optim's Adam, AdamW or SGD."""
        flat = self._weights()
        saved = state_dict["state"]
        _check_saved(state_dict, self.param_groups)
        for group, other in zip(self.param_groups, state_dict["param_groups"]):
            group.update({name: value for name, value in other.items() if name in self.defaults})
        for number, parameter in enumerate(flat.parameters):
            for name, view in self.state.get(parameter, {}).items():
                given = saved.get(number, {}).get(name)
                view.zero_() if given is None else view.copy_(given)
        first = saved.get(0, {})
        counts = (
            MergeCounts.from_tensor(first[COUNTS]) if COUNTS in first else MergeCounts(step=int(first.get("step", 0)))
        )
        self._merger.restore(counts, first[ARRIVING].to(flat.values, copy=True) if ARRIVING in first else None)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: all weights are in one flat tensor."""
        if self._flat is not None:
            raise ConfigError("parameters cannot be added to a k-step optimizer; build a new one with all of them")
        super().add_param_group(param_group)

    def _weights(self) -> FlatWeights:
        assert self._flat is not None
        self._flat.check()
        return self._flat

    def _average_gradients(self, weight: float, ranks: RankGroup) -> None:
        wire = torch.cat([self._gradients, self._gradients.new_ones(1)]).mul_(weight)
        ranks.sum_(wire, self._over)
        # Nothing waits for the device: if no rank has weight the gradients are zero and stay zero.
        torch.div(wire[:-1], wire[-1].clamp_min(torch.finfo(wire.dtype).tiny), out=self._gradients)

    def _average_both(self, weight: float) -> Tensor:
        """Average the gradients over all ranks, and return the mean of their squares: v grows as it would by merges."""
        size = self._gradients.numel()
        wire = torch.cat([self._gradients, self._gradients.square(), self._gradients.new_ones(1)]).mul_(weight)
        self._other_sums.sum_(wire)
        mean = wire[:-1].div_(wire[-1].clamp_min(torch.finfo(wire.dtype).tiny))
        self._gradients.copy_(mean[:size])
        return mean[size:]

    def _decays(self) -> list[MomentDecay]:
        sgd = self.inner == "sgd"
        places = self._weights().groups
        return [
            MomentDecay(place, group["momentum"] if sgd else group["betas"][0], group["betas"][1])
            for group, place in places
        ]


def _check_settings(k: int, merge: str, inner: str, delay: int) -> None:
    problems = []
    if k < 1:
        problems.append(f"k is the number of steps between merges, at least 1; given: {k}")
    if merge not in MERGE_RULES:
        problems.append(f"merge is one of {', '.join(MERGE_RULES)}; given: {merge!r}")
    if inner not in INNER:
        problems.append(f"inner is one of {', '.join(INNER)}; given: {inner!r}")
    if inner == "sgd" and merge in SHARING:
        problems.append(f'merge="{merge}" shares a second moment, and inner="sgd" has none; use "params" or "moments"')
    if not 1 <= delay <= max(1, k):
        problems.append(
            f"delay is at least 1 and at most k ({k}), so that a merge is used before the next; given: {delay}"
        )
    if problems:
        raise ConfigError("; ".join(problems))


def _check_saved(saved: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    given, here = ([len(group["params"]) for group in one] for one in (saved["param_groups"], groups))
    if given != here:
        raise ConfigError(
            f"the state has groups of {given} parameters, this optimizer of {here}; build it as the saved one"
        )
    parameters = [parameter for group in groups for parameter in group["params"]]
    for number, state in saved["state"].items():
        for name, value in state.items():
            moment = name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer") and value is not None
            if moment and value.shape != parameters[number].shape:
                raise ConfigError(
                    f"{name} of parameter {number} has the shape {tuple(value.shape)}, the parameter "
                    f"{tuple(parameters[number].shape)}; load the state of the same model"
                )


class RunState(NamedTuple):
    """The weights of one run, and everything that moves them; tensors of one length."""

    x: Tensor
    g: Tensor  # gradient
    m: Tensor  # first moment; empty where the rule has none
    v: Tensor  # second moment; likewise
    square: Tensor | None = None  # increment of v, if it is not the square of the gradient
    shared: Tensor | None = None  # the second moment that all ranks share, bias-corrected
    frozen: bool = False  # divide by it alone, not by the larger of it and v
    scale: float = 1.0  # of Adam's step, not of its decay


Inner = Callable[[RunState, dict[str, Any], int], None]


def adam_(run: RunState, group: dict[str, Any], step: int) -> None:
    """`step` counts from 1; weight decay is added to the gradient."""
    g, square = run.g, run.square
    if group["weight_decay"]:
        g = g.add(run.x, alpha=group["weight_decay"])
        if square is not None:  # the mean of (g + d)^2, d the same everywhere
            square = square.add(g.square()).sub_(run.g.square()).clamp_min_(0)
    _adam_(run._replace(g=g, square=square), group, step)


def adamw_(run: RunState, group: dict[str, Any], step: int) -> None:
    """Weight decay shrinks the weights, apart from the step."""
    run.x.mul_(1 - group["lr"] * group["weight_decay"])
    _adam_(run, group, step)


def sgd_(run: RunState, group: dict[str, Any], step: int) -> None:
    """Plain, or with a momentum that starts as the first gradient."""
    g = run.g
    if group["weight_decay"]:
        g = g.add(run.x, alpha=group["weight_decay"])
    if group["momentum"]:
        g = run.m.mul_(group["momentum"]).add_(g)
    run.x.add_(g, alpha=-group["lr"])


def _adam_(run: RunState, group: dict[str, Any], step: int) -> None:
    x, g, m, v, square, shared, frozen, scale = run
    beta1, beta2 = group["betas"]
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2)
    v.addcmul_(g, g, value=1 - beta2) if square is None else v.add_(square, alpha=1 - beta2)
    rate = scale * group["lr"]
    if shared is not None and frozen:
        most = _longest_step(beta1, beta2)
        move = m.div(1 - beta1**step).div_(shared.sqrt().add_(group["eps"])).clamp_(-most, most)
        x.add_(move, alpha=-rate)
        return
    correction = 1 - beta2**step
    root = v.sqrt().div_(correction**0.5) if shared is None else torch.maximum(v / correction, shared).sqrt_()
    x.addcdiv_(m, root.add_(group["eps"]), value=-rate / (1 - beta1**step))


def _longest_step(beta1: float, beta2: float) -> float:
    """How many times its rate Adam moves a weight at most, whatever the gradients (Cauchy and Schwarz; 7.3 by default)."""
    rest = (1 - beta2) * (1 - beta1**2 / beta2) if beta2 else 0.0
    return (1 - beta1) / rest**0.5 if rest > 0 else float("inf")


INNER: dict[str, Inner] = {"adam": adam_, "adamw": adamw_, "sgd": sgd_}
