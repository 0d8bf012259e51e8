"""Models by name. In: vectors [B, F, W] and dense features [B, N]; out: logits [B].

Every docstring ends with its reference and its parameter count, tables not included: F id features, D = dim, N dense
features, X = F * D + N, and mlp(n, hidden, out) = (n + 1) h_1 + (h_1 + 1) h_2 + ... + (h_k + 1) out for an MLP from n
inputs (without out: no last term), plus 2 (h_1 + ... + h_k) with batch norm; last(n, hidden) = h_k, or n if k = 0.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hotbed.errors import ConfigError, ModelError
from hotbed.models.autoint import AutoInt
from hotbed.models.base import Model, ModelSchema, check_options, model_options
from hotbed.models.deep import DLRM, DNN, DCNv2, FinalMLP, MMoE, WideDeep
from hotbed.models.fm import FM, LR, DeepFM
from hotbed.models.own import ModelInputs, build_own, check_own
from hotbed.models.own_code import is_own, own_names, read_source, shown_name
from hotbed.models.sequence import DIN, VectorSequence, block_of, pad

__all__ = [
    "ALL_MODELS",
    "MODELS",
    "NAMED_MODELS",
    "Model",
    "ModelCard",
    "ModelInputs",
    "ModelSchema",
    "VectorSequence",
    "block_of",
    "build_model",
    "check_model",
    "is_own",
    "model_card",
    "own_names",
    "pad",
    "read_source",
    "reads_sequences",
    "rebuild_model",
    "shown_name",
    "vector_width",
]

MODELS: dict[str, type[Model]] = {
    "lr": LR,
    "fm": FM,
    "dnn": DNN,
    "wide_deep": WideDeep,
    "deepfm": DeepFM,
    "dlrm": DLRM,
    "dcnv2": DCNv2,
    "autoint": AutoInt,
    "finalmlp": FinalMLP,
}


NAMED_MODELS: dict[str, type[Model]] = {"din": DIN, "mmoe": MMoE}  # they get the names of their features
ALL_MODELS = {**MODELS, **NAMED_MODELS}


class ModelCard(NamedTuple):
    """The facts that `hotbed models` lists."""

    name: str
    summary: str
    width: str  # of the table rows, in terms of dim
    options: dict[str, Any]  # with their defaults
    reference: str
    parameters: str


def find_model(name: str) -> type[Model]:
    """The class behind a name."""
    if name not in ALL_MODELS:
        close = [model for model in ALL_MODELS if name and (model.startswith(name) or name.startswith(model))]
        close = close or difflib.get_close_matches(name, ALL_MODELS, n=1)
        hint = f" Did you mean {close[0]}?" if close else " A model of your own is named my_model.py:MyModel."
        raise ConfigError(f"no model {name!r}; there are {', '.join([*ALL_MODELS, *own_names()])}.{hint}")
    return ALL_MODELS[name]


def check_model(name: str, options: Mapping[str, Any], source: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The options converted to the types of the model, before any data is known; a ConfigError lists every mistake."""
    if source or is_own(name):
        return check_own(name, options, source)
    return check_options(name, find_model(name), options)


def build_model(
    name: str,
    *,
    num_features: int,
    dim: int,
    num_dense: int,
    options: Mapping[str, Any],
    features: Sequence[str] = (),
    dense: Sequence[str] = (),
    sequences: Mapping[str, int] | None = None,
    tasks: Sequence[str] = (),
    source: Mapping[str, Any] | None = None,
) -> Model:
    """The model `name` with its options, initialised from torch's global generator.

    A user's own model, and one that reads sequences, gets the names of its features; `source` is the saved code of the former.
    """
    checked = check_model(name, options, source)
    schema = ModelSchema(tuple(features), dim, tuple(dense), dict(sequences or {}), tuple(tasks))
    if source or is_own(name):
        return build_own(name, schema, checked, source)
    named = (schema,) if name in NAMED_MODELS else ()
    return find_model(name)(num_features, dim, num_dense, *named, **checked)


def rebuild_model(settings: Mapping[str, Any]) -> Model:
    """The model of a run or an export, from its model.json; a user's own model from the code saved there."""
    if is_own(settings["name"]) and not settings.get("source"):
        raise ModelError(
            f"the code of the model {settings['name']} is not in model.json. A file of that name is not used instead, since "
            "it may be another model; restore the code, or train again."
        )
    return build_model(**settings)


def vector_width(name: str, dim: int) -> int:
    """The width of the table rows that a model reads."""
    return dim if is_own(name) else find_model(name).vector_width(dim)


def reads_sequences(name: str) -> bool:
    """Whether a model reads the vectors of a sequence one by one; to others it is a bag."""
    return is_own(name) or find_model(name).reads_sequences


def model_card(name: str) -> ModelCard:
    """The facts of one model, from its class and docstring."""
    model = find_model(name)
    lines = (inspect.getdoc(model) or "").splitlines() or [""]
    tagged: dict[str, str] = {}
    for line in lines[1:]:
        tag, _, text = line.partition(": ")
        if tag in ("Reference", "Parameters"):
            tagged[tag] = text
        elif tagged and line.startswith(" "):
            last = list(tagged)[-1]
            tagged[last] += " " + line.strip()
    return ModelCard(
        name,
        lines[0],
        {1: "1", 7: "dim", 8: "dim + 1"}[model.vector_width(7)],
        model_options(model),
        tagged.get("Reference", ""),
        tagged.get("Parameters", ""),
    )
