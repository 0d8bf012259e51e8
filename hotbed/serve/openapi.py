"""/openapi.json: requests and answers of the server, for the model it serves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple
from urllib.parse import quote

import hotbed
from hotbed.data.encode import raw_column
from hotbed.data.schema import DenseColumn, IdFeature, Schema, Task, clock_of
from hotbed.scorer.tensors import outputs_of
from hotbed.serve.infer import infer_example
from hotbed.serve.request import Limits

OPEN = frozenset({"/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"})  # paths that never need the token

_MOST_LOG = 69.0  # the log of 1e30, beyond which no number is read
_PROBABILITY = {"type": "number", "minimum": 0, "maximum": 1}
_SCORES = {  # by the kind of the label
    "binary": {"type": "array", "items": _PROBABILITY},
    "regression": {"type": "array", "items": {"type": "number"}},
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {"type": "string", "description": "What is wrong."},
        "where": {
            "type": "string",
            "description": "The place in the request, such as candidates.user[3] or rows[3].user.",
        },
        "limit": {"type": "number", "description": "The limit that was exceeded."},
    },
}
_TENSOR = {
    "type": "object",
    "required": ["name", "datatype", "shape", "data"],
    "properties": {
        "name": {"type": "string", "description": "Of a feature."},
        "datatype": {"type": "string", "description": "BYTES (strings), INT64, FP64 and the narrower numbers."},
        "shape": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0},
            "description": "[B], [B, 1] or, for bags, [B, L]; B is 1 for a value that all candidates share.",
        },
        "data": {"type": "array", "description": "Flat or nested; null: missing, or the end of a shorter bag."},
    },
}


class ServedModel(NamedTuple):
    """What the paths are about."""

    name: str
    schema: Schema
    labels: tuple[Task, ...]  # that it learned

    @property
    def further(self) -> tuple[Task, ...]:
        """The labels next to that of `--label`."""
        return self.labels[1:]


def document(model: ServedModel, limits: Limits, with_token: bool = False) -> dict[str, Any]:
    """OpenAPI 3.1."""
    found = _document(model, limits)
    if with_token:
        found["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"token": []}]
        for path in OPEN & found["paths"].keys():
            found["paths"][path]["get"]["security"] = []
    return found


def _document(model: ServedModel, limits: Limits) -> dict[str, Any]:
    features = features_of(model.schema)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "hotbed scorer",
            "version": hotbed.__version__,
            "description": "Click probabilities of candidates from a trained model.",
        },
        "paths": {
            "/score": {"post": _score(model, features, limits)},
            "/healthz": {"get": _plain("The process is alive.", "Alive.", "text/plain")},
            "/readyz": {
                "get": {
                    **_plain("Whether it accepts requests.", "It does.", "text/plain"),
                    "responses": {"200": {"description": "It does."}, "503": {"description": "It is shutting down."}},
                }
            },
            "/metrics": {"get": _plain("Counters for Prometheus.", "Text format 0.0.4.", "text/plain")},
            "/reload": {"post": _reload()},
            "/openapi.json": {"get": _plain("This document.", "OpenAPI 3.1.", "application/json")},
            "/": {"get": _plain("This document for people.", "A page.", "text/html")},
            **_inference(model, limits),
        },
        "components": {
            "schemas": {
                "Error": _ERROR,
                "Tensor": _TENSOR,
                "Context": {
                    "type": "object",
                    "description": "Features that all candidates share.",
                    "properties": features,
                    "additionalProperties": False,
                },
                "Candidates": {
                    "type": "object",
                    "description": "Features by column: lists of one value for each candidate, all of the same length.",
                    "properties": {
                        name: {"type": "array", "items": one, "minItems": 1, "maxItems": limits.candidates}
                        for name, one in features.items()
                    },
                    "additionalProperties": False,
                    "minProperties": 1,
                },
                "Row": {"type": "object", "properties": features, "additionalProperties": False},
            }
        },
    }


def features_of(schema: Schema) -> dict[str, Any]:
    """The schema of one value of every column."""
    found: dict[str, Any] = {}
    for spec in schema.dense:
        number = {"type": ["number", "null"], "description": "A number; null: missing."}
        found[spec.name] = {**number, "example": _usual(spec)}
    for feature in schema.features:
        found.setdefault(raw_column(feature), _value_of(feature))
    return found


def _usual(spec: DenseColumn) -> float:
    """A typical raw number: the mean of the column, with the transform undone."""
    if spec.transform != "log":
        return float(f"{spec.mean:.4g}")
    return float(round(math.copysign(math.expm1(min(abs(spec.mean), _MOST_LOG)), spec.mean)))


def example_of(schema: Schema) -> dict[str, Any]:
    """A request of two candidates."""
    features = features_of(schema)
    names = list(features)
    half = len(names) // 2
    return {
        "context": {name: features[name]["example"] for name in names[:half]},
        "candidates": {name: [features[name]["example"]] * 2 for name in names[half:]},
    }


def _value_of(feature: IdFeature) -> dict[str, Any]:
    if feature.source == "bucket":
        return {"type": ["number", "null"], "description": "A number, read as a bucket; null: missing.", "example": 3}
    if clock := clock_of(feature.source):
        about = f"A time, read as its {clock.part}; null: missing."
        example: str | int = 1 if clock.unit != "s" else "2017-11-07 09:30"
        if clock.unit.startswith("%"):
            example = datetime(2017, 11, 7, 9, 30).strftime(clock.unit)
        return {"type": ["string", "number", "null"], "description": about, "example": example}
    kinds: list[str] = ["string", "integer", "null"]
    example = "some-id"
    if feature.source == "integer":  # row 0 is in every table
        kinds, example = ["integer", "null"], 0 if feature.mode == "direct" else 7
    one = {
        "type": kinds,
        "description": "An id; null: missing; an id not seen in training counts as unknown.",
        "example": example,
    }
    if not feature.multi:
        return one
    several: list[Any] = [{"type": "array", "items": {"type": kinds}}]
    if feature.separator:
        several = [{"type": "string"}]
    return {
        "anyOf": [*several, {"type": "null"}],
        "description": (
            f"Ids in order; the {feature.keep} {feature.length} are read" if feature.length else "Ids of one bag"
        )
        + (f", joined by {feature.separator!r}." if feature.separator else "."),
        "example": feature.separator.join(["a", "b"]) if feature.separator else [example],
    }


def _refused(description: str) -> dict[str, Any]:
    return {
        "description": description,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }


def _refusals(limits: Limits) -> dict[str, Any]:
    """The refusals of a request that scores."""
    return {
        "400": _refused("The body is not JSON."),
        "411": _refused("The length of the body is not a number."),
        "413": _refused(f"More than {limits.body_bytes} bytes or {limits.candidates} candidates."),
        "422": _refused("A part, a feature or a value is missing, unknown or of the wrong type."),
        "503": _refused(
            f"More than {limits.in_flight} requests at once, or no answer within {limits.seconds} s; "
            "Retry-After says when to try again."
        ),
    }


def _score(model: ServedModel, features: dict[str, Any], limits: Limits) -> dict[str, Any]:
    body = {
        "oneOf": [
            {
                "type": "object",
                "required": ["candidates"],
                "properties": {
                    "context": {"$ref": "#/components/schemas/Context"},
                    "candidates": {"$ref": "#/components/schemas/Candidates"},
                },
                "additionalProperties": False,
            },
            {
                "type": "object",
                "required": ["rows"],
                "properties": {
                    "context": {"$ref": "#/components/schemas/Context"},
                    "rows": {
                        "type": "array",
                        "items": {"$ref": "#/components/schemas/Row"},
                        "minItems": 1,
                        "maxItems": limits.candidates,
                    },
                },
                "additionalProperties": False,
            },
        ]
    }
    answer = {
        "type": "object",
        "required": ["scores", "model", *(["tasks"] if model.further else [])],
        "properties": {
            "scores": _SCORES["binary"],
            **_tasks(model.further),
            "model": {"type": "string", "description": "The version of the model that computed all of them."},
        },
    }
    return {
        "summary": "Score candidates.",
        "description": f"Every one of {', '.join(features)} is given once: in context, or for each candidate.",
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": body, "example": example_of(model.schema)}},
        },
        "responses": {
            "200": {
                "description": "One probability for each candidate, in order."
                + (" The scores of further labels are in tasks, by name." if model.further else ""),
                "content": {"application/json": {"schema": answer}},
            },
            **_refusals(limits),
        },
    }


def _tasks(further: Sequence[Task]) -> dict[str, Any]:
    """The part of an answer with the scores of further labels, where there are any."""
    if not further:
        return {}
    scores = {task.name: _SCORES[task.kind] for task in further}
    return {"tasks": {"type": "object", "required": list(scores), "properties": scores}}


def _inference(model: ServedModel, limits: Limits) -> dict[str, Any]:
    """The paths of the Open Inference Protocol."""
    schema, outputs = model.schema, ", ".join(f"`{one.name}`" for one in outputs_of([one.name for one in model.labels]))
    tensors = {"type": "array", "items": {"$ref": "#/components/schemas/Tensor"}, "minItems": 1}
    body = {
        "type": "object",
        "required": ["inputs"],
        "properties": {"id": {"type": "string"}, "inputs": tensors, "outputs": {"type": "array"}, "parameters": {}},
        "additionalProperties": False,
    }
    answer = {
        "type": "object",
        "required": ["model_name", "model_version", "outputs"],
        "properties": {
            **{part: {"type": "string"} for part in ("model_name", "model_version", "id")},
            "outputs": tensors,
        },
    }
    absent = {"404": _refused("There is no such model or version.")}
    infer = {
        "summary": "Score candidates, by the Open Inference Protocol.",
        "description": f"One tensor for each of {', '.join(features_of(schema))}. "
        + (f"Outputs: {outputs}." if model.further else "The output is `scores`, probabilities."),
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": body, "example": infer_example(schema, example_of(schema))}},
        },
        "responses": {
            "200": {"description": "The scores.", "content": {"application/json": {"schema": answer}}},
            **absent,
            **_refusals(limits),
        },
    }

    def about(summary: str, more: dict[str, Any]) -> dict[str, Any]:
        found = _plain(summary, "As said.", "application/json")
        return {"get": {**found, "responses": found["responses"] | more}}

    closing = {"503": {"description": "It is shutting down."}}
    found = {
        "/v2": about("Name and version of the server.", {}),
        "/v2/health/live": about("The process is alive.", {}),
        "/v2/health/ready": about("Whether it accepts requests.", closing),
    }
    root = f"/v2/models/{quote(model.name)}"
    for path in (root, f"{root}/versions/{{version}}"):
        found[path] = about("Inputs and outputs of the model.", absent)
        found[f"{path}/ready"] = about("Whether it accepts requests.", absent | closing)
        found[f"{path}/infer"] = {"post": infer}
    version = {"name": "version", "in": "path", "required": True, "schema": {"type": "string"}}
    for path in (one for one in found if "{version}" in one):
        found[path] = {verb: {**one, "parameters": [version]} for verb, one in found[path].items()}
    return found


def _reload() -> dict[str, Any]:
    return {
        "summary": "Look for a newer model now; from this machine only.",
        "responses": {
            "200": {
                "description": "The kind of update (none, same, incremental, full, whole, refused) and the current model.",
                "content": {
                    "application/json": {
                        "schema": {
                            "type": "object",
                            "properties": {
                                "update": {"type": "string"},
                                "model": {"type": "string"},
                                "error": {"type": "string"},
                            },
                        }
                    }
                },
            },
            "403": {"description": "The client is on another machine."},
        },
    }


def _plain(summary: str, description: str, media: str) -> dict[str, Any]:
    return {"summary": summary, "responses": {"200": {"description": description, "content": {media: {}}}}}
