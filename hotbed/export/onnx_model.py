"""A trained dense model in, model.onnx out; onnxruntime must reproduce the model's logits on random inputs.

Inputs `vectors` [B, C, W] (models/sequence.py), where the model has dense features `dense` [B, N], and where it reads sequences
`lengths` [B, S] (int64); outputs `logit` [B] and `probability` [B], of a model of several labels also `tasks` [B, K], the
scores of the further ones; all others float32, any B. Needs the packages of hotbed[onnx].
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from hotbed.data.schema import Task
from hotbed.errors import ConfigError, RunError, reason_of
from hotbed.host.extras import how_to_install
from hotbed.models import Model

OPSET = 18  # the oldest that torch's exporter writes without conversion, so the most runtimes read it
TOLERANCE = 1e-5  # of a logit of size 1, in addition to rounding
OUTPUTS = ("logit", "probability", "tasks")  # the last one of a model of several labels
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_SAMPLES = 64
_ROUNDINGS = 4  # sums in another order may round this much worse than torch's


def check_packages() -> None:
    """Raise a ConfigError unless ONNX can be written."""
    absent = [name for name in _PACKAGES if find_spec(name) is None]
    if absent:
        raise ConfigError(
            f"an ONNX file needs {', '.join(absent)}, which {'is' if len(absent) == 1 else 'are'} not installed. "
            f"{how_to_install('onnx')} brings what is missing; --no-onnx exports without it."
        )


def input_shapes(model: Model) -> dict[str, list[str | int]]:
    """The shape of every input, by name."""
    shapes: dict[str, list[str | int]] = {"vectors": ["batch", model.num_columns, model.vector_width(model.dim)]}
    if model.num_dense:
        shapes["dense"] = ["batch", model.num_dense]
    if model.sequences:
        shapes["lengths"] = ["batch", len(model.sequences)]
    return shapes


@torch.no_grad()
def further_labels(model: Model, labels: Sequence[Task]) -> list[str]:
    """The names of the labels that the model learned in addition to the first; `labels` are those of the schema."""
    outputs = ProbabilityModel(model, [task.kind for task in labels]).eval()(*_inputs(model, 3))
    return [task.name for task in labels[1:]] if len(outputs) == len(OUTPUTS) else []


def write_onnx(path: Path, model: Model, labels: Sequence[Task] = ()) -> None:
    """Write and check the file; a RunError if onnxruntime and torch disagree. `labels` are those of the schema."""
    check_packages()
    import onnx

    whole = ProbabilityModel(model, [task.kind for task in labels]).eval()
    example = _inputs(model, 3)
    with torch.no_grad():
        outputs = dict(zip(OUTPUTS, whole(*example)))
    batch = torch.export.Dim("batch", min=1)
    try:
        with _quiet():
            program = torch.onnx.export(
                whole,
                example,
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                input_names=list(input_shapes(model)),
                output_names=list(outputs),
                dynamic_shapes=tuple({0: batch} for _ in example),
            )
    except torch.onnx.OnnxExporterError as error:
        reason = reason_of(error.__cause__ or error)
        raise RunError(
            f"torch cannot write this model as ONNX for batches of any size: {reason}. --no-onnx exports rows and dense "
            "weights alone."
        ) from error
    assert program is not None, "torch.onnx.export returns a program"
    proto = program.model_proto
    for node in proto.graph.node:
        del node.metadata_props[:]  # paths of source files on this machine
    onnx.checker.check_model(proto, full_check=True)
    path.write_bytes(proto.SerializeToString())
    compare(path, whole, model)


class ProbabilityModel(nn.Module):
    """The model with the outputs logit, probability and, if it learned several labels, the scores of the further ones."""

    def __init__(self, model: Model, kinds: Sequence[str] = ()) -> None:
        super().__init__()
        self.model = model
        self.kinds = tuple(kinds[1:])

    def forward(self, vectors: Tensor, second: Tensor | None = None, third: Tensor | None = None) -> tuple[Tensor, ...]:
        """The inputs of `input_shapes`, in their order."""
        others = [one for one in (second, third) if one is not None]
        dense = others.pop(0) if self.model.num_dense else vectors.new_zeros(vectors.shape[0], 0)
        logits = self.model.logits(vectors, dense, *others)
        if logits.dim() == 1:
            return logits, torch.sigmoid(logits)
        first, *others = logits.unbind(1)
        tasks = [torch.sigmoid(one) if kind == "binary" else one for kind, one in zip(self.kinds, others)]
        return first, torch.sigmoid(first), torch.stack(tasks, dim=1)


def _inputs(model: Model, size: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = {name: [size, *(int(one) for one in shape[1:])] for name, shape in input_shapes(model).items()}
    made = {
        name: torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
        for name, shape in shapes.items()
    }
    if model.sequences:
        lengths = [
            torch.randint(length + 1, (size,), generator=generator, device="cpu", dtype=torch.int64)
            for length in model.sequences.values()
        ]
        made["lengths"] = torch.stack(lengths, dim=1)
    return tuple(made.values())


@torch.no_grad()
def compare(path: Path, whole: nn.Module, model: Model) -> None:
    """Raise a RunError unless onnxruntime agrees with the model."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    inputs = _inputs(model, _SAMPLES)
    all_exact = copy.deepcopy(whole).double()(*(one.double() if one.is_floating_point() else one for one in inputs))
    theirs = session.run(None, dict(zip(input_shapes(model), (one.numpy() for one in inputs))))
    for name, exact, ours, found in zip(OUTPUTS, all_exact, whole(*inputs), theirs):
        apart, rounding = (torch.from_numpy(found).double() - exact).abs(), (ours.double() - exact).abs().max()
        if not bool((apart <= TOLERANCE * exact.abs().clamp(min=1.0) + _ROUNDINGS * rounding).all()):
            raise RunError(
                f"onnxruntime disagrees with the model that was exported: {name} is up to {float(apart.max()):.2g} apart from "
                f"that of float64, and torch's is {float(rounding):.2g}. --no-onnx exports rows and dense weights alone."
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's exporter: its messages are not about the user's model, which is checked afterwards."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    try:
        log.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
