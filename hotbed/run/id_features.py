"""What a dataset says of its ids, for tables of dynamic ids: which features have one, and how many ids there will be.

Dynamic tables take ids as they are in the dataset: 64-bit ids of features with the mode raw or hash (which are then not
folded), row numbers of a vocabulary.
"""

from __future__ import annotations

import difflib

from hotbed.data.schema import IdFeature, Schema

_BAG = 16  # ids of a bag, where only a guess is needed


def is_dynamic(dynamic: bool | list[str], feature: str) -> bool:
    """Whether a feature gets a table of dynamic ids; `dynamic` as a run file says it."""
    return dynamic if isinstance(dynamic, bool) else feature in dynamic


def id_problems(dynamic: bool | list[str], data: str, schema: Schema) -> list[str]:
    """Features that are not there, and features that need a dynamic table and have none."""
    names = [feature.name for feature in schema.features]
    problems = []
    for name in dynamic if isinstance(dynamic, list) else ():
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
            problems.append(f"tables.dynamic: {data} has no id feature {name!r}; {hint}")
    raw = [one.name for one in schema.features if one.mode == "raw" and not is_dynamic(dynamic, one.name)]
    if raw:
        problems.append(
            f"tables.dynamic: must be true, or a list with {', '.join(raw)}, for {data}: their ids are raw 64-bit numbers, "
            "and no rows were counted for them. Train with --dynamic, or prepare the data with --ids-mode vocabulary or hash"
        )
    return problems


def ids_of_train(schema: Schema) -> dict[str, int]:
    """By feature, how many distinct ids the train split has, or can have where nobody counted them."""
    train = schema.splits.get("train")
    samples = train.rows if train else 0
    return {one.name: _most_ids(one, samples) for one in schema.features}


def _most_ids(feature: IdFeature, samples: int) -> int:
    if feature.mode in ("vocabulary", "direct"):
        return feature.rows
    return feature.distinct or samples * (_BAG if feature.multi else 1)


def rows_of_unseen(schema: Schema, batch_size: int) -> int:
    """Rows that one batch may need for ids that the train split does not have."""
    return batch_size * sum(_BAG if one.multi else 1 for one in schema.features)
