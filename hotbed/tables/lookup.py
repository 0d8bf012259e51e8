"""One batch in, its vectors out: what a call of EmbeddingTables comes to.

A batch that was planned ahead, or recorded, is used as it is; any other is read, its ids become keys, and its rows are brought
in now. Each group is then looked up, as a node of the autograd graph where its rows learn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hotbed.host.devices import check_current
from hotbed.ops.lookups import Lookups
from hotbed.tables.autograd import Call, LookupFunction, Step, UpdatableTables
from hotbed.tables.exchange import Exchange
from hotbed.tables.group.group import TableGroup
from hotbed.tables.inputs import BatchInputs, Feature, GroupInputs, read_inputs
from hotbed.tables.keyed import KeyedJagged
from hotbed.tables.outputs import split_of
from hotbed.tables.ownership import Ownership, PreparedBatch
from hotbed.tables.recorded import RecordedLookups
from hotbed.tables.spec import Output
from hotbed.tables.torch_hooks import is_recomputed, refuse_tracing
from hotbed.tables.transaction import REFUSALS
from hotbed.types import Jagged

Ids = Tensor | Mapping[str, Tensor | Jagged] | KeyedJagged
Bags = Mapping[str, Jagged] | None
Vectors = Tensor | dict[str, Tensor]


class LookupTables(UpdatableTables, Protocol):
    """EmbeddingTables, as far as this needs them."""

    features: list[Feature]
    output: Output
    groups: list[TableGroup]
    group_inputs: list[GroupInputs]
    exchange: Exchange
    ownership: Ownership

    @property
    def learns(self) -> bool:
        """Whether backward moves rows."""


class BatchLookup:
    """Looks up batches of one EmbeddingTables, which passes itself to every call; keeps what is known of earlier batches."""

    @torch.inference_mode(False)  # the trigger outlives it
    def __init__(self, groups: Sequence[TableGroup], recorded: RecordedLookups | None) -> None:
        self._recorded = recorded
        self._translates = any(group.keyspace.is_dynamic for group in groups)
        self._unchecked: list[Callable[[], None]] = []  # questions whose answer is still on its way from the device
        # autograd calls backward only for functions of something that requires a gradient
        self._trigger = torch.zeros(0, requires_grad=True, dtype=torch.float32, device="cpu")

    def vectors(self, tables: LookupTables, ids: Ids, bags: Bags) -> Vectors:
        """The vectors of a batch; their gradient moves rows, if rows learn."""
        refuse_tracing()
        check_current(tables.device)
        with tables.changes.lock:
            planned = tables.ownership.find(ids, bags)
            if planned is None and self._recorded is not None:
                planned = self._recorded.find(ids, bags)
            learning = torch.is_grad_enabled() and tables.learns
            teaches = learning and not (self._translates and is_recomputed())  # dynamic ids count once in a batch
            if planned is None or (planned.ahead is not None and not _still_holds(tables, planned, teaches)):
                given = read_inputs(
                    tables.features, ids, bags, tables.device
                )  # of ids read ahead there is nothing else
            else:
                given = planned.given
            self._check_ids()
            step, output = Step(tables), tables.output
            vectors: dict[str, Tensor] = {}
            all_lookups = self._prepared(tables, given, planned, teaches)
            for group, inputs, lookups, plain in zip(
                tables.exchange.fronts, tables.group_inputs, all_lookups, tables.groups
            ):
                moves = learning and not plain.is_frozen
                if lookups.ticket is None and lookups.check is not None:
                    self._unchecked.append(lookups.check_ids)
                is_block = output != "dict" and len(tables.groups) == 1
                cut = None if is_block else split_of(inputs.features, given)
                scale = lookups.scale
                weighted = scale is not None and scale.requires_grad
                if moves or (weighted and torch.is_grad_enabled()):
                    call = Call(group, lookups, inputs.tables, step, moves, cut)
                    out: Any = LookupFunction.apply(self._trigger, scale, call)  # type: ignore[no-untyped-call]
                else:
                    block = group.lookup(lookups.with_scale(None if scale is None else scale.detach()))
                    out = block if cut is None else cut.split(block)
                if cut is None:
                    shape = (len(inputs.features), group.layout.dim)
                    whole: Tensor = out.view(given.size, *(shape if output == "stack" else (math.prod(shape),)))
                    return whole
                vectors |= zip(cut.names, out)
            if output == "concat":
                return torch.cat([vectors[feature.name] for feature in tables.features], dim=1)
            if output == "stack":
                return torch.stack([vectors[feature.name] for feature in tables.features], dim=1)
            return {feature.name: vectors[feature.name] for feature in tables.features}

    def check(self, device: torch.device) -> None:
        """Raise for what is wrong in the batches so far, once the device knows it: before anything reads or writes all rows."""
        self._check_ids()
        if self._recorded is not None:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            self._recorded.check()

    def stop_recording(self) -> None:
        """Look every batch up launch by launch."""
        self._recorded = None

    def rows_moved(self) -> None:
        """Rows are in other tensors."""
        if self._recorded is not None:
            self._recorded.forget()

    def _prepared(
        self, tables: LookupTables, given: BatchInputs, planned: PreparedBatch | None, learns: bool
    ) -> list[Lookups]:
        """The lookups of every group, their rows in place. For dynamic ids a call that learns is the next training batch."""
        tables.changes.check()
        groups, exchange = tables.groups, tables.exchange
        if planned is not None and (not self._translates or _still_holds(tables, planned, learns)):
            lookups = [tables.placed(group, each, learns) for group, each in zip(groups, planned.lookups)]
        elif not self._translates:
            wished = exchange.wishes(given, exchange.settle(given, planned), learns)
            lookups = [tables.placed(group, each, learns) for group, each in zip(groups, wished)]
        else:
            again = [group.keyspace.asks_again() for group in groups]
            tables.ownership.claim(drop=learns or any(again))
            lookups = _learned(tables, given, exchange.settle(given, planned), learns)
        calls = exchange.calls(lookups, planned)
        if learns and self._translates:  # last: a batch that another rank refuses is taken back before the next one
            for group in groups:
                group.keyspace.count()
        return calls

    def _check_ids(self) -> None:
        """Raise for a bad id of the batch before; its rows were not updated."""
        if self._unchecked:
            checks = self._unchecked.copy()
            self._unchecked.clear()
            for check in checks:
                check()


def _still_holds(tables: LookupTables, planned: PreparedBatch, learns: bool) -> bool:
    """Whether ids would become the same keys in a call now."""
    return all(group.keyspace.fits(each.origin, learns) for group, each in zip(tables.groups, planned.lookups))


def _learned(tables: LookupTables, given: BatchInputs, settled: Any, learns: bool) -> list[Lookups]:
    """The lookups of dynamic ids: they are translated and their rows brought in, or nothing is learned."""
    with tables.changes.changing("looking a batch up"):
        if learns:
            _take_back(tables)  # of a call that was interrupted
        try:
            wished = tables.exchange.wishes(given, settled, learns)
            return [group.residency.placed(each, learns) for group, each in zip(tables.groups, wished)]
        except REFUSALS:
            if learns:
                _take_back(tables)
            raise


def _take_back(tables: LookupTables) -> None:
    for group in tables.groups:
        group.residency.take_back()
