"""Tables as a user declares them: checked, and made into features and an output form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hotbed.cache import POLICIES
from hotbed.errors import ConfigError
from hotbed.ids import Admit, Expire
from hotbed.ops.init_rows import Init, Normal
from hotbed.ops.records import PRECISIONS, Precision
from hotbed.ops.shard import Shard
from hotbed.optim import RowOptimizer
from hotbed.tables.inputs import Feature
from hotbed.tables.sizing.budget import Budgets, Room
from hotbed.tables.sizing.fit import OwnSettings, members_by_group
from hotbed.tables.sizing.placement import PLACEMENTS, Placement

Pooling = Literal["sum", "mean", "none"]
Output = Literal["auto", "stack", "dict", "concat"]


_ABSENT: Any = ...  # not given; None is a value of `rows`


@dataclass(frozen=True, init=False)
class Table:
    """One embedding table: `rows` vectors of `dim` numbers, read by one feature of the same name or by `features`.

    The names of torch and TorchRec work too: Table(num_embeddings=1000, embedding_dim=16) is Table(rows=1000, dim=16).

    rows=None: any 64-bit id, each with a row of its own from its first training batch on; `admit` and `expire` say which ids
    get one, and for how long (docs/dynamic-ids.md).

    Several `features` that share the table read and train the same rows; `pooling` may then name one for each of them:
    Table(1000, 16, pooling={"item": "sum", "history": "none"}).

    `optimizer` (with its learning rate), `precision`, `policy` and `cache` override those of the tables; the table trains as it
    would alone with these settings, to the bit. `frozen`: its rows stay as they are.

    `placement` is for ranks (ShardedTables): "row" spreads rows over all of them, "table" keeps the table on one, "column"
    gives each a slice of every row.
    """

    rows: int | None
    dim: int
    # "none": every value keeps its own vector, for sequences; a mapping has no hash
    pooling: Pooling | Mapping[str, Pooling] = field(default="sum", hash=False)
    features: tuple[str, ...] | None = None
    hashing: bool = False  # ids modulo rows; else an id outside 0..rows-1 is an error
    padding_id: int | None = None  # this id contributes nothing and is never updated
    init: Init = Normal(0.01)  # noqa: RUF009  frozen
    admit: Admit | None = None  # None: every id, at once
    expire: Expire | None = None  # None: never
    optimizer: RowOptimizer | None = None  # None: that of the tables, as for the next three
    precision: Precision | None = None
    policy: str | None = None
    cache: float | None = None  # the share of its rows on the device
    frozen: bool = False  # its rows never move, and carry no optimizer state
    placement: Placement | None = None  # of ShardedTables: what each rank has of it; None: as the others

    def __init__(
        self,
        rows: int | None = _ABSENT,
        dim: int = _ABSENT,
        pooling: Pooling | Mapping[str, Pooling] = "sum",
        features: tuple[str, ...] | None = None,
        hashing: bool = False,
        padding_id: int | None = None,
        init: Init = init,
        admit: Admit | None = None,
        expire: Expire | None = None,
        optimizer: RowOptimizer | None = None,
        precision: Precision | None = None,
        policy: str | None = None,
        cache: float | None = None,
        frozen: bool = False,
        placement: Placement | None = None,
        *,
        num_embeddings: int | None = _ABSENT,
        embedding_dim: int = _ABSENT,
    ) -> None:
        if features is None and isinstance(pooling, Mapping):
            features = tuple(pooling)
        values = {
            "rows": _one_of("rows", rows, "num_embeddings", num_embeddings),
            "dim": _one_of("dim", dim, "embedding_dim", embedding_dim),
            "pooling": pooling,
            "features": features,
            "hashing": hashing,
            "padding_id": padding_id,
            "init": init,
            "admit": admit,
            "expire": expire,
            "optimizer": optimizer,
            "precision": precision,
            "policy": policy,
            "cache": cache,
            "frozen": frozen,
            "placement": placement,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)  # frozen

    @property
    def own(self) -> OwnSettings | None:
        """Its settings that differ from those of other tables; None: none."""
        given = OwnSettings(self.optimizer, self.precision, self.policy, self.cache, self.frozen)
        return None if given == OwnSettings() else given

    def pooling_of(self, name: str) -> dict[str, Pooling]:
        """The pooling of every feature that reads this table, which is called `name`."""
        features = self.features or (name,)
        if isinstance(self.pooling, Mapping):
            return {feature: self.pooling[feature] for feature in features}
        return dict.fromkeys(features, self.pooling)

    @property
    def num_embeddings(self) -> int | None:
        """`rows`, by torch's name."""
        return self.rows

    @property
    def embedding_dim(self) -> int:
        """`dim`, by torch's name."""
        return self.dim


def _one_of(name: str, value: Any, other_name: str, other: Any) -> Any:
    """The value of a setting that has two names and was given by one of them."""
    if value is _ABSENT and other is _ABSENT:
        raise ConfigError(
            f"a table needs {name}= (or {other_name}=, the same setting by torch's name) and none was given; "
            "for example Table(rows=1000, dim=16)"
        )
    if value is not _ABSENT and other is not _ABSENT:
        raise ConfigError(
            f"{name}={value!r} and {other_name}={other!r} were both given, and they are two names of one setting; "
            "give only one of them"
        )
    return other if value is _ABSENT else value


def features_of(tables: dict[str, Table]) -> list[Feature]:
    """The features in declared order; all mistakes in the tables at once."""
    wrong: list[str] = []
    owners: dict[str, str] = {}
    if not tables:
        wrong.append("no tables were given")
    for name, table in tables.items():
        wrong += _wrong_ids(name, table)
        for size in ("rows", "dim"):
            value = getattr(table, size)
            if size == "rows" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                wrong.append(f"table {name!r}: {size} must be a whole number from 1, not {value!r}")
        wrong += _wrong_pooling(name, table)
        if isinstance(table.features, str) or table.features == ():
            wrong.append(f"table {name!r}: features must be a tuple of names, not {table.features!r}")
        for feature in table.features or (name,):
            if feature in owners:
                wrong.append(f"feature {feature!r} reads two tables, {owners[feature]!r} and {name!r}")
            owners[feature] = name
    if wrong:
        raise ConfigError("; ".join(wrong))
    return [Feature(one, name, how) for name, table in tables.items() for one, how in table.pooling_of(name).items()]


def _wrong_pooling(name: str, table: Table) -> list[str]:
    by_feature = isinstance(table.pooling, Mapping)
    given = set(table.pooling.values()) if isinstance(table.pooling, Mapping) else {table.pooling}
    wrong = [
        f"table {name!r}: pooling must be 'sum', 'mean' or 'none', not {one!r}"
        for one in given - {"sum", "mean", "none"}
    ]
    if by_feature and set(table.pooling) != set(table.features or (name,)):
        named, read = ", ".join(table.pooling), ", ".join(table.features or (name,))
        wrong.append(f"table {name!r}: pooling names {named}, and the table is read by {read}; they must be the same")
    return wrong


def _wrong_ids(name: str, table: Table) -> list[str]:
    """Settings for dynamic ids, or for others, that contradict each other."""
    wrong = []
    for what, kind in (("admit", Admit), ("expire", Expire)):
        rule = getattr(table, what)
        if rule is None:
            continue
        if not isinstance(rule, kind):
            wrong.append(f"table {name!r}: {what} must be a hotbed.{kind.__name__}, not {rule!r}")
        if table.rows is not None:
            wrong.append(f"table {name!r}: {what}= is for dynamic ids; give rows=None, or leave it out")
    if table.rows is None and table.hashing:
        wrong.append(f"table {name!r}: hashing takes ids modulo rows, and rows is None; leave one of them out")
    wrong += _wrong_settings(name, table)
    padding = table.padding_id
    if padding is not None and (not isinstance(padding, int) or not -(2**63) <= padding < 2**63):
        wrong.append(f"table {name!r}: padding_id must be a 64-bit id, not {padding!r}")
    return wrong


def _wrong_settings(name: str, table: Table) -> list[str]:
    wrong = []
    if table.precision is not None and table.precision not in PRECISIONS:
        wrong.append(f"table {name!r}: precision must be one of {', '.join(PRECISIONS)}, not {table.precision!r}")
    if table.policy is not None and table.policy not in POLICIES:
        wrong.append(f"table {name!r}: policy must be one of {', '.join(POLICIES)}, not {table.policy!r}")
    rows_by: Any = table.optimizer
    if rows_by is not None and not isinstance(rows_by, RowOptimizer):
        wrong.append(f"table {name!r}: optimizer must be one of hotbed.optim, not {rows_by!r}")
    if table.frozen and table.optimizer is not None:
        wrong.append(f"table {name!r}: frozen rows never move; leave out optimizer= or frozen=True")
    if table.placement is not None and table.placement not in PLACEMENTS:
        known = ", ".join(map(repr, PLACEMENTS))
        wrong.append(f"table {name!r}: placement must be one of {known}, not {table.placement!r}")
    share = table.cache
    if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1):
        wrong.append(f"table {name!r}: cache is a share of its rows, above 0 and at most 1, not {share!r}")
    if share is not None and table.rows is None:
        wrong.append(f"table {name!r}: cache= is a share of rows, and rows is None; give hbm= of the tables instead")
    return wrong


def own_rooms(rooms: Sequence[Room], tables: dict[str, Table], budgets: Budgets, shards: Sequence[Shard]) -> list[Room]:
    """The room of every group, where some have a share of their own; without cache= the others then keep all their rows."""
    found = []
    usual = 1.0 if any(table.cache is not None for table in tables.values()) and budgets.cache is None else None
    for room, shard, (kind, named) in zip(rooms, shards, members_by_group(tables).items()):
        share = usual if kind.own is None or kind.own.cache is None else kind.own.cache
        if share is not None:
            if budgets.ssd is not None or budgets.hbm is not None:
                given = "ssd" if budgets.ssd is not None else "hbm"
                raise ConfigError(
                    f"table {_first_share(tables)!r}: cache= is a share of its rows, and {given}= divides bytes among all "
                    "tables; leave one of them out"
                )
            num_rows = shard.num_local(sum(table.rows or 0 for table in named.values()))
            found.append(room._replace(num_slots=max(1, round(share * num_rows))))
        else:
            found.append(room)
    return found


def _first_share(tables: dict[str, Table]) -> str:
    return next(name for name, table in tables.items() if table.cache is not None)


def output_of(output: Output, tables: dict[str, Table], features: list[Feature]) -> Output:
    dims = {table.dim for table in tables.values()}
    sequences = [feature.name for feature in features if feature.pooling == "none"]
    if output == "auto":
        return "stack" if len(dims) == 1 and not sequences else "dict"
    if output not in ("stack", "dict", "concat"):
        raise ConfigError(f"output must be 'auto', 'stack', 'dict' or 'concat', not {output!r}")
    if output == "stack" and len(dims) > 1:
        raise ConfigError(f"output 'stack' needs equal dims; the tables have {sorted(dims)}. Use 'concat' or 'dict'.")
    if output != "dict" and sequences:
        raise ConfigError(f"output {output!r} cannot hold sequence features ({', '.join(sequences)}). Use 'dict'.")
    return output
