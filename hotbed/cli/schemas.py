"""What `--json` prints, command by command, as JSON Schema; docs/json.md is written from it, and tests validate against it.

A command may print more properties than are listed; those that are listed stay, with their type, until the next major
version.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _is(kind: str, about: str, **more: Any) -> Schema:
    return {"type": kind.split("|") if "|" in kind else kind, "description": about, **more}


def _object(properties: dict[str, Schema], optional: tuple[str, ...] = (), about: str = "") -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "description": about, "properties": properties, "required": required}


def _map(values: Schema, about: str) -> Schema:
    return {"type": "object", "description": about, "additionalProperties": values}


def _list(items: Schema, about: str) -> Schema:
    return {"type": "array", "description": about, "items": items}


_TEXT, _NUMBER, _COUNT = _is("string", ""), _is("number|null", ""), _is("integer", "")
_DRY_RUN = _is("boolean", "Whether this was a dry run, which writes nothing.")
_OUT = _is("string", "The folder or file that is written.")
_METRICS = _object(
    {
        "auc": _is("number|null", "Area under the ROC curve; null if only one label occurs."),
        "log_loss": _is("number|null", "Mean binary cross-entropy."),
        "normalized_entropy": _is("number|null", "Log loss over that of always predicting the mean."),
        "calibration": _is("number|null", "Mean prediction over mean label."),
        "samples": _is("integer", "Samples of the split."),
        "pr_auc": _is("number|null", "Average precision; null without a positive."),
        "best_auc": _is("number|null", "The best possible AUC, for a synthetic log."),
        "gap": _is("number|null", "best_auc less auc."),
    },
    optional=("best_auc", "gap"),
    about="Exact metrics over all samples.",
)

_TRIAL = {
    "type": ["object", "null"],
    "description": "A trial: its number, state, values by setting, valid_auc, test_auc, steps, seconds and evaluations.",
}

SCHEMAS: dict[str, Schema] = {
    "tune": _object(
        {
            "dry_run": _DRY_RUN,
            "out": _OUT,
            "trials": _is("integer", "Trials that have ended; in a dry run, that would be run."),
            "space": _list(_TEXT, "The settings that would be tried, in a dry run."),
            "best": {**_TRIAL, "description": f"The best trial. {_TRIAL['description']}"},
            "defaults": {**_TRIAL, "description": "The first trial, which has the settings of `hotbed train`."},
        },
        optional=("space", "best", "defaults"),
    ),
    "train": _object(
        {
            "dry_run": _DRY_RUN,
            "run": _is("string", "The run folder."),
            "steps": _is("integer", "Steps made; in a dry run, that would be made."),
            "samples": _is("integer", "Samples trained; in a dry run, samples of the train split."),
            "finished": _is("boolean", "False if the run was interrupted; --resume continues it."),
            "final": _map(_METRICS, "Metrics of each held-out split."),
            "samples_per_s": _is("number|null", "Speed over the whole training."),
            "train_seconds": _is("number", "Seconds of training."),
            "device": _is("string", "Where it trained."),
            "saved_bytes": _is("integer", "Bytes that would be saved, in a dry run."),
        },
        optional=("finished", "final", "samples_per_s", "train_seconds", "device", "saved_bytes"),
    ),
    "prepare": _object(
        {
            "dry_run": _DRY_RUN,
            "out": _OUT,
            "splits": _map(_object({"rows": _COUNT, "positives": _COUNT}), "Rows and positive labels of each split."),
            "features": _list(
                _object(
                    {
                        "name": _is("string", "The column."),
                        "rows": _is("integer|null", "Rows of its table; null in a dry run and for dynamic ids."),
                        "distinct": _is("integer|null", "Distinct ids in train; null in a dry run."),
                        "multi": _is("boolean|null", "Whether a row holds several ids; null in a dry run."),
                        "table": _is("string", "Its table: its own name, or that of --share."),
                    }
                ),
                "The columns that are ids.",
            ),
            "dense": _list(_TEXT, "The columns that are numbers."),
            "bad_rows": _map(_COUNT, "Rows that could not be read, by reason."),
            "left_out": _is("integer", "Good rows that belong to no split."),
            "raw_bytes": _is("integer", "Bytes read."),
            "seconds": _is("number", "Seconds it took."),
        },
        optional=("bad_rows", "left_out", "raw_bytes", "seconds"),
    ),
    "evaluate": _object(
        {
            "model": _is("string", "The model, with its step if it is a checkpoint."),
            "data": _is("string", "The dataset."),
            "split": _is("string", "The split; raw: files with labels."),
            "metrics": _METRICS,
            "more": _map({}, "Metrics of further labels (tasks), within groups (grouped_auc) and by slice (by)."),
        },
        optional=("more",),
    ),
    "predict": _object(
        {
            "dry_run": _DRY_RUN,
            "out": _OUT,
            "scores": _is("integer", "Scores written."),
            "bad_rows": _is("integer", "Rows that could not be read and have no score."),
            "model": _is("string", "The version of the model; empty for the final model of a run."),
        }
    ),
    "models": _object(
        {
            "models": _list(
                _object({"name": _TEXT, "summary": _TEXT, "width": _TEXT, "options": _map({}, ""), "reference": _TEXT}),
                "The models of hotbed, with their options and defaults.",
            ),
            "own": _map(_TEXT, "Models of installed packages, and their classes."),
        }
    ),
    "data describe": _object(
        {
            "splits": _map(_object({"rows": _COUNT, "positive_rate": _NUMBER}), "Rows and share of positive labels."),
            "features": _list(
                _object({"name": _TEXT, "rows": _COUNT, "distinct": _COUNT, "lookups": _COUNT, "top_share": _NUMBER}),
                "The id features; top_share: the share of lookups on the most frequent 1.5 % of the ids.",
            ),
            "total": _object({"rows": _COUNT, "distinct": _COUNT, "lookups": _COUNT}, about="All features together."),
        }
    ),
    "data list": _object(
        {
            "datasets": _list(
                _object(
                    {
                        "name": _TEXT,
                        "summary": _TEXT,
                        "licence": _TEXT,
                        "how": _is("string", "", enum=["embedded", "download", "by hand"]),
                    }
                ),
                "The known datasets, and how to get them.",
            )
        }
    ),
    "data get": _object(
        {
            "dry_run": _DRY_RUN,
            "name": _is("string", "The dataset."),
            "licence": _is("string", "Its licence."),
            "files": _list(_TEXT, "The files; in a dry run, that would be fetched."),
        }
    ),
    "data make": _object(
        {
            "dry_run": _DRY_RUN,
            "out": _is("string|null", "The dataset folder."),
            "text": _is("string|null", "The raw text file, or a folder of them."),
            "rows": _map(_COUNT, "Rows of each split."),
            "best_auc": _map({"type": "number"}, "The best possible AUC of each split; empty without a dataset."),
        }
    ),
    "report": _object({"dry_run": _DRY_RUN, "page": _is("string", "The page."), "runs": _list(_TEXT, "The runs.")}),
    "plan": _object(
        {
            "setting": _is("object", "Model, data, rows, record size, slots and ranks of the run."),
            "fits": _is("boolean", "Whether the run fits its budgets and this machine."),
            "bytes": _is("array", "Bytes of every part of every tier, exact or estimated."),
            "device_bytes": _is("integer", "Sum of the device."),
            "memory_bytes": _is("integer", "Sum of host memory."),
            "ssd_bytes": _is("integer", "Sum of the ssd."),
            "samples_per_s": _is("number|null", "Forecast speed; null without calibration."),
            "bottleneck": _is("string|null", "The part of a step that the others wait for."),
            "traffic": _is("object|null", "Hit rates and rows moved per step; null without a cache."),
            "speed": _is("object|null", "Seconds of a step and its parts; null without calibration."),
            "problems": _list(_TEXT, "Why it does not fit; empty if it does."),
            "recommendation": _is("object|null", "A cache that fits and misses almost no more rows."),
            "choice": _is(
                "object|null",
                "With --choose: settings, each with its value and why; options to add; shares of the cache by table.",
            ),
            "what_if": _is("object", "The same figures for every value of --what-if."),
        }
    ),
    "simulate": _object(
        {
            "caches": _list(
                _object(
                    {
                        "cache": _is("number", "Share of the rows."),
                        "num_slots": _is("integer", "Slots of the cache."),
                        "policy": _is("string", "The policy."),
                        "misses": _is("integer", "Rows that had to be brought in."),
                        "hit_rate": _is(
                            "number|null", "Share of the distinct rows of a window that were in the cache."
                        ),
                        "lookup_hit_rate": _is("number|null", "Share of the lookups that were."),
                        "rows_hit": _is("number", "Share of the distinct rows of every batch that were."),
                        "optimum": _is("integer", "The fewest misses of any cache of that size."),
                    }
                ),
                "One entry for each size and policy.",
            )
        }
    ),
    "explain": _object(
        {
            "table": _is("string", "The table, with --top."),
            "rows": _is("array", "The most used or evicted rows, with --top."),
            "notes": _list(_TEXT, "What limits the answer."),
        },
        optional=("table", "rows"),
    ),
    "verify": _object(
        {
            "same": _is("boolean", "Whether every bit was the same."),
            "ways": _list(
                _object(
                    {
                        "way": _is("string", "How rows were kept: on demand, prefetched, over memory and ssd."),
                        "same": _is("boolean", "Whether this way gave the same bits."),
                        "steps": _COUNT,
                        "lookups": _COUNT,
                        "rows": _COUNT,
                        "evictions": _COUNT,
                        "difference": _is("object|null", "The first difference: step, table, id, both values."),
                    }
                ),
                "One entry for each way.",
            ),
        }
    ),
    "bench": _object(
        {
            "results": _list(
                _object(
                    {
                        "system": _is("string", "The system that was timed."),
                        "ms_p50": _is("number", "Median milliseconds of a step."),
                        "samples_per_s": _is("number", "Samples per second."),
                    }
                ),
                "One entry for each system and setting, with the columns of --csv.",
            )
        }
    ),
    "topo": _object(
        {
            "machines": _list(
                _object(
                    {
                        "host": _is("string", "Its name."),
                        "numa_nodes": _list(
                            _object(
                                {
                                    "number": _COUNT,
                                    "cores": _list(_COUNT, "Cores that this process may use."),
                                    "memory": _is("integer", "Bytes."),
                                }
                            ),
                            "Cores that are equally near to some memory.",
                        ),
                        "gpus": _list(
                            _object(
                                {
                                    "number": _COUNT,
                                    "name": _TEXT,
                                    "address": _is("string", "On the PCI bus; empty if it is unknown."),
                                    "node": _is("integer|null", "Its NUMA node; null if it is unknown."),
                                }
                            ),
                            "CUDA devices.",
                        ),
                        "ranks": _list(
                            _object(
                                {
                                    "cores": _list(_COUNT, "Cores of the rank."),
                                    "node": _is("integer|null", "NUMA node for its memory; null: any."),
                                    "threads": _COUNT,
                                    "gpu": _is("integer|null", "Its GPU; null on a CPU."),
                                }
                            ),
                            "What each local rank gets.",
                        ),
                        "bound": _is("boolean", "Whether ranks are bound to their cores, by parallel.bind=auto."),
                        "why": _is("string", "Why, or why not."),
                    }
                ),
                "The machines of the ranks.",
            ),
            "mesh": _object(
                {
                    "nodes": _COUNT,
                    "local_ranks": _COUNT,
                    "hops": _is("integer", "Of an exchange of rows between all ranks: 1 or 2."),
                },
                about="How ranks are laid out.",
            ),
            "links": {
                "type": ["object", "null"],
                "description": "What was measured; null for a single process.",
                "properties": {
                    "bytes_per_s": _list(_is("array", ""), "For each rank, its rate to every rank; null to itself."),
                    "exchange": _is(
                        "object", "An exchange of num_bytes a rank between all: seconds in one hop and in two."
                    ),
                },
                "required": ["bytes_per_s"],
            },
        }
    ),
    "top": _object(
        {
            "runs": _list(
                _object(
                    {
                        "name": _TEXT,
                        "status": _is("string", "", enum=["running", "finished", "not running"]),
                        "step": _NUMBER,
                        "total_steps": _NUMBER,
                        "seconds_left": _NUMBER,
                        "numbers": _map(_NUMBER, "The newest value of every metric."),
                    }
                ),
                "The state of each run.",
            )
        }
    ),
    "checkpoint list": _object(
        {
            "checkpoints": _list(
                _object(
                    {
                        "name": _is("string", "Its folder, with its rank."),
                        "step": _COUNT,
                        "kind": _is("string", "full or incremental."),
                        "parent": _is("string|null", "The checkpoint it depends on."),
                        "num_bytes": _COUNT,
                        "num_rows": _COUNT,
                        "time": _is("number", "When it was written, in seconds since 1970."),
                        "damaged": _is("string", "What is wrong; then only the name is known."),
                    },
                    optional=("step", "kind", "parent", "num_bytes", "num_rows", "time", "damaged"),
                ),
                "Oldest first.",
            )
        }
    ),
    "checkpoint verify": _object(
        {"intact": _list(_TEXT, "Checkpoints without a fault."), "problems": _list(_TEXT, "What is damaged.")}
    ),
    "checkpoint diff": _object(
        {
            "settings": _map({"type": "array"}, "Settings that differ, with both values."),
            "shapes": _map(_TEXT, "Tables that differ in shape."),
            "tables": _map(
                _object({"same": _COUNT, "changed": _COUNT, "added": _COUNT, "gone": _COUNT}), "Rows of each table."
            ),
            "dense": _list(_object({"name": _TEXT, "what": _TEXT, "largest": _NUMBER}), "Dense tensors that differ."),
        }
    ),
    "checkpoint prune": _object(
        {
            "dry_run": _DRY_RUN,
            "removed": _list(_TEXT, "The checkpoints; in a dry run, that would be removed."),
            "num_bytes": _is("integer", "Their size."),
        }
    ),
    "export": _object(
        {
            "dry_run": _DRY_RUN,
            "out": _OUT,
            "rows": _map(_COUNT, "Rows of each table."),
            "orders": _map(_TEXT, "Order of the rows of each table: count or id."),
            "num_bytes": _is("integer", "Size of the export."),
        }
    ),
}
