"""What torch does to a whole model, and rows follow although they are no parameters: compiling, scaling, freezing, zeroing.

torch reports none of the last three, so four of its methods are wrapped when the first tables are made: `scale` of GradScaler,
whose results from then on say during their backward pass that gradients are scaled, and by how much; its `step`, which drops
gradients of tables that it leaves out; and `requires_grad_` and `zero_grad` of nn.Module, which from then on also reach tables
inside the module. Models without tables notice nothing.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from functools import partial, wraps
from types import FrameType
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.amp.grad_scaler import GradScaler, OptState

from hotbed.errors import HotbedError

_P = ParamSpec("_P")
_T = TypeVar("_T")
_WAY_OUT = "export the dense model alone, with tables(ids) as its input, and take the rows from tables.rows(table)"
_PASSES = 64  # backward passes whose scale is remembered; no more are ever under way at once


def eager(fn: Callable[_P, _T]) -> Callable[_P, _T]:
    """As torch.compiler.disable, which would load the compiler (1.3 s) for everybody and takes 1 us a call.

    Here only where a compiled function calls: what that calls would be compiled, too.
    """
    disabled: list[Callable[_P, _T]] = []

    @wraps(fn)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if get_eval_frame_callback() is None:
            return fn(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(fn))  # type: ignore[no-untyped-call]
        return disabled[0](*args, **kwargs)

    called._torchdynamo_disable = True  # type: ignore[attr-defined]  # a compiled caller does not look inside
    called._torchdynamo_disable_msg = "hotbed's tables are not compiled; " + _WAY_OUT  # type: ignore[attr-defined]
    return called


def refuse_tracing() -> None:
    """Raise inside torch.jit.trace, torch.export and torch.onnx.export: a lookup they record holds no rows and is wrong.

    Inside torch.func, too, whose tensors have no memory that a lookup could read.
    """
    if torch._C._is_tracing() or torch.compiler.is_exporting():
        raise HotbedError(
            "a lookup in hotbed's tables cannot be traced or exported: the file would not hold the rows. `hotbed export RUN` "
            f"writes a trained model with its rows, and its dense part as ONNX; in your own code {_WAY_OUT}"
        )
    if torch._C._functorch.maybe_current_level() is not None:
        raise HotbedError(
            "a lookup in hotbed's tables cannot be a part of torch.func (vmap, grad, ...): call tables(ids) before, with the "
            "ids of all samples, and give the vectors to the function that is transformed"
        )


def refuse_average() -> None:
    """Raise where torch's AveragedModel copies a model: it averages parameters, and the rows of its copy would never move."""
    swa = sys.modules.get("torch.optim.swa_utils")
    frame = sys._getframe(1) if swa is not None else None
    while swa is not None and frame is not None:
        if frame.f_code is swa.AveragedModel.__init__.__code__:
            raise HotbedError(
                "AveragedModel averages parameters, and the rows of tables are not parameters: those of its copy would never "
                "move. Average the dense model alone; or keep copy.deepcopy(model) and, after every step, move the tensors of "
                "its state_dict() towards those of model.state_dict(), which hold the rows of tables without a cache"
            )
        frame = frame.f_back


class ScaledBackward:
    """A backward pass whose loss was scaled."""

    def __init__(self, scaler: GradScaler, factor: Tensor) -> None:
        self.scaler = scaler
        self.factor = factor  # []
        self.has_overflowed = False

    def has_unscaled(self, optimizer: object) -> bool:
        """Whether the scaler itself took its factor out of the gradients that this optimizer is about to use."""
        state = self.scaler._per_optimizer_states.get(id(optimizer))
        return state is not None and state["stage"] is not OptState.READY

    def unscaled(self, grad: Tensor) -> Tensor | None:
        """The gradient of the loss itself; None where it is not finite, which is reported to the scaler."""
        inverse = self.factor.double().reciprocal().to(device=grad.device, dtype=grad.dtype)
        grad = grad * inverse
        if bool(torch.isfinite(grad).all()):
            return grad
        if not self.has_overflowed:
            self.has_overflowed = True
            _report_overflow(self.scaler, grad.device)
        return None


_scaled: OrderedDict[int, ScaledBackward] = OrderedDict()  # by number of the backward pass
_reports: WeakKeyDictionary[GradScaler, deque[torch.optim.Optimizer]] = WeakKeyDictionary()


def current_pass() -> int:
    """The number of the backward pass that is under way in this thread; -1 outside."""
    number: int = torch._C._current_graph_task_id()
    return number


def is_recomputed() -> bool:
    """Whether torch.utils.checkpoint calls a part of a model a second time, in backward, for tensors that it did not keep.

    That is so with use_reentrant=False, where the graph of the first call learns and that of the second is thrown away.
    """
    if current_pass() == -1:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "unpack_hook" and frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False


def scaled_pass(around: int) -> ScaledBackward | None:
    """What is known of the backward pass that is under way, or else of that around it, if its loss was scaled."""
    return _scaled.get(current_pass()) or _scaled.get(around) if _scaled else None


def backward_in_caller() -> None:
    """From now on backward passes that this thread starts run in it, as far as CUDA devices are concerned.

    torch has a thread for every GPU and wakes it for each pass, which takes 0.1 to 0.3 ms on a virtual machine whose idle cores
    have halted: as long as a row update. What runs, on which streams and in which order stays the same; a model that is spread
    over several GPUs of one process launches on one after the other. `torch.autograd.set_multithreading_enabled(True)` around
    a call of backward() is honoured.
    """
    if torch._C._is_multithreading_enabled():
        torch._C._set_multithreading_enabled(False)


def listen() -> None:
    """Wrap the methods of torch, once; of scalers those of all kinds that are known by now."""
    kinds = [GradScaler]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if "scale" in vars(kind) and not hasattr(kind.scale, "hotbed_listens"):
            kind.scale = _reporting(kind.scale)  # type: ignore[assignment,method-assign]
    if not hasattr(nn.Module.requires_grad_, "hotbed_listens"):
        GradScaler.step = _stepping_rows(GradScaler.step)  # type: ignore[method-assign]
        nn.Module.requires_grad_ = _freezing_rows(nn.Module.requires_grad_)  # type: ignore[assignment,method-assign]
        nn.Module.zero_grad = _zeroing_rows(nn.Module.zero_grad)  # type: ignore[method-assign]


def _reporting(scale: Callable[[GradScaler, Any], Any]) -> Callable[[GradScaler, Any], Any]:
    """`GradScaler.scale`, whose results report the backward pass that starts from them."""

    @wraps(scale)
    def reporting(self: GradScaler, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        return _each(scaled, partial(_watch, self, partial(scale, self))) if self.is_enabled() else scaled

    reporting.hotbed_listens = True  # type: ignore[attr-defined]
    return eager(reporting)


def _stepping_rows(step: Callable[..., Any]) -> Callable[..., Any]:
    """`GradScaler.step`, after which no gradients of tables wait: `tables.step()` took them, or they overflowed."""

    @wraps(step)
    def stepping(self: GradScaler, optimizer: Any, *arguments: Any, **settings: Any) -> Any:
        moved = step(self, optimizer, *arguments, **settings)
        getattr(optimizer, "forget_gradients", bool)()
        return moved

    return stepping


def _watch(scaler: GradScaler, scale: Callable[[Tensor], Tensor], output: Tensor) -> Tensor:
    if output.requires_grad:
        factor = scale(torch.ones((), dtype=torch.float32, device=output.device))

        @eager
        def report(grad: Tensor) -> None:
            _scaled.setdefault(
                current_pass(), ScaledBackward(scaler, factor)
            )  # what was scaled last comes first, and has all of it
            while len(_scaled) > _PASSES:
                _scaled.popitem(last=False)

        output.register_hook(report)  # type: ignore[no-untyped-call]
    return output


def _each(outputs: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """`outputs` as GradScaler takes them: a tensor, or a nest of iterables of tensors."""
    if isinstance(outputs, Tensor):
        return fn(outputs)
    every: Iterable[Any] = map(partial(_each, fn=fn), outputs)
    return type(outputs)(every) if isinstance(outputs, (list, tuple)) else every


def _report_overflow(scaler: GradScaler, device: torch.device) -> None:
    """The scaler hears of gradients from optimizers: one of a single weight with a gradient that is not finite."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float32, device=device))
    weight.grad = torch.full_like(weight, torch.inf)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler.unscale_(optimizer)
    _reports.setdefault(scaler, deque(maxlen=_PASSES)).append(optimizer)  # it is known by its id until the next update


def _freezing_rows(requires_grad_: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """`nn.Module.requires_grad_`, also of tables inside."""

    @wraps(requires_grad_)
    def reaching(self: nn.Module, requires_grad: bool = True) -> nn.Module:
        for module in self.modules():
            freeze = getattr(module, "freeze_rows", None)
            if freeze is not None:
                freeze(not requires_grad)
        return requires_grad_(self, requires_grad)

    reaching.hotbed_listens = True  # type: ignore[attr-defined]
    return reaching


def _zeroing_rows(zero_grad: Callable[..., None]) -> Callable[..., None]:
    """`nn.Module.zero_grad`, also of tables inside."""

    @wraps(zero_grad)
    def reaching(self: nn.Module, set_to_none: bool = True) -> None:
        for module in self.modules():
            forget = getattr(module, "forget_gradients", None)
            if forget is not None:
                forget()
        zero_grad(self, set_to_none)

    return reaching
