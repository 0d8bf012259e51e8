"""Settings and data of a run -> its tiers, traffic, stages and speed, and what does not fit, with a way out.

Exact: bytes of rows and their index, and counts of simulated batches. Estimated: later batches, the ssd below memory, all
times, and the network of several ranks.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
import torch

from hotbed.cache import MOST_BATCHES, look_ahead_for, window_length
from hotbed.data.dataset import Dataset
from hotbed.errors import BudgetError, ConfigError, StoreError
from hotbed.forecast import memory
from hotbed.forecast.calibrate import CALIBRATED_AHEAD, Calibration, calibrate, is_cached, known_calibration
from hotbed.forecast.measure import plan_seconds, ssd_problems, ssd_speed
from hotbed.forecast.memory import BatchShape, MemoryPart
from hotbed.forecast.replicas import replicas_of
from hotbed.forecast.request import ForecastRequest
from hotbed.forecast.step_time import StepJob, StepSpeed, WireJob, Wires, speed_of, wires_of
from hotbed.forecast.traffic import RowTraffic, add_traffic, simulate_run, with_memory
from hotbed.host.devices import pick_device
from hotbed.host.memory import in_words, parse_bytes, typed
from hotbed.parallel.world import World
from hotbed.pipeline.reader import READ_AHEAD
from hotbed.run.config import RunConfig
from hotbed.store import tiered
from hotbed.store.ssd.format import RECORD_HEAD
from hotbed.tables.sizing.budget import SSD_BYTES_PER_KEY, Room, rooms_of, staged_row_bytes
from hotbed.tables.sizing.enough import with_some_to_spare
from hotbed.tables.sizing.fit import BatchSample, model_problems, sizes_of, table_problems, too_small
from hotbed.train.build import model_of
from hotbed.train.build_ranks import rank_problems


class Forecast(NamedTuple):
    """What a run will need."""

    setting: dict[str, Any]
    parts: list[MemoryPart]
    traffic: RowTraffic | None  # None: every row is on the device
    record: int  # bytes
    wires: Wires | None  # with several ranks
    speed: StepSpeed | None  # None: not measured
    calibration: Calibration | None
    problems: list[str]
    notes: list[str]

    def bytes_of(self, tier: str) -> float:
        return sum(part.num_bytes for part in self.parts if part.tier == tier)

    @property
    def bytes_in(self) -> float:
        """To the device, of a step."""
        return self.traffic.copied * self.record if self.traffic else 0.0

    @property
    def bytes_out(self) -> float:
        return self.traffic.written_back * self.record if self.traffic else 0.0

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        traffic = self.traffic
        return {
            "setting": self.setting,
            "fits": not self.problems,
            "problems": self.problems,
            "bytes": [part._asdict() for part in self.parts],
            "device_bytes": self.bytes_of("device"),
            "memory_bytes": self.bytes_of("memory"),
            "ssd_bytes": self.bytes_of("ssd"),
            "traffic": None if traffic is None else traffic._asdict(),
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "ssd_read": traffic.from_ssd * self.record if traffic else 0.0,
            "ssd_written": traffic.to_ssd * self.record if traffic else 0.0,
            "network": None if self.wires is None else self.wires._asdict(),
            "speed": None if self.speed is None else self.speed._asdict(),
            "samples_per_s": None if self.speed is None else self.speed.samples_per_s,
            "bottleneck": None if self.speed is None else self.speed.bottleneck,
            "notes": self.notes,
        }


def make_forecast(request: ForecastRequest) -> Forecast:
    """Forecast one run. `problems` lists what does not fit; the rest is forecast anyway."""
    config, dataset = request.config, request.dataset
    _check_rows(config, dataset)
    device = pick_device(config.train.device)
    cuda = device.type == "cuda"
    problems = rank_problems(config, World(0, request.world))
    rooms: list[Room] = []
    try:
        sketch = request.sketch
        everywhere = sizes_of(sketch.tables, sketch.optimizer, sketch.precision)
        rooms = rooms_of(sketch.budgets, sketch.amounts.groups, device.type, sketch.amounts.stored, everywhere)
    except (BudgetError, ConfigError) as error:
        problems.append(str(error))
    with torch.device("meta"):
        model = model_of(config, dataset.schema)
    room = _together(rooms)
    if room is not None:
        problems += table_problems(request.sketch.budgets, request.sketch.amounts, device, request.sketch.most_used)
    problems += model_problems(model, device)
    traffic, notes = None, []
    num_slots = room.num_slots if room is not None else None
    if num_slots is not None:
        small = _too_small(request, rooms) + _too_much_to_move(request, rooms, cuda)
        problems += small
        if not small:
            traffic = add_traffic([_traffic(request, number, one, cuda) for number, one in enumerate(rooms)])
            notes += _notes(traffic, request)
    shape = _shape(request, is_needed=num_slots is not None)
    model_bytes = memory.model_bytes(model)
    parts = _parts(request, room, traffic, shape, model_bytes, cuda)
    replicas = replicas_of(request, rooms)
    parts[1:1], notes, problems = replicas.parts, notes + replicas.notes, problems + replicas.problems
    problems += ssd_problems(request.sketch, room, config.tables.ssd)
    known = None if problems else _calibration(request)
    wires = _wires(request, shape, known, sum(one.numel() for one in model.parameters()), notes)
    speed = None
    if known is not None:
        job = _with_ssd(request, _job(request, traffic, num_slots, shape, wires, cuda), traffic, notes)
        speed = speed_of(known, traffic, job)
        parts += _measured_parts(known, request, shape, model_bytes)
    record, problems = request.sketch.amounts.record, list(dict.fromkeys(problems))
    return Forecast(_setting(request, device, num_slots), parts, traffic, record, wires, speed, known, problems, notes)


def _wires(
    request: ForecastRequest, shape: BatchShape, known: Calibration | None, num_weights: int, notes: list[str]
) -> Wires | None:
    """What a rank sends in a step; None for a single process."""
    if request.world == 1:
        return None
    mode = request.config.parallel.mode
    notes.append(f"network: {request.links.about}")
    if mode != "sharded":
        notes.append(f"network: bytes and times are those of parallel.mode=sharded, not of {mode}")
    seconds = 0.0 if known is None else known.step
    job = WireJob(request.links.cluster(request.world), request.links.fabric, seconds, num_weights)
    return wires_of(request.frequencies, shape, request.sketch, job, request.config)


def _with_ssd(request: ForecastRequest, job: StepJob, traffic: RowTraffic | None, notes: list[str]) -> StepJob:
    """The same job with the speed of the ssd, where rows come from one."""
    ssd = request.config.tables.ssd
    if ssd and traffic is not None:
        try:
            return job._replace(ssd_speed=ssd_speed(ssd, request.sketch.amounts.record))
        except StoreError as error:
            notes.append(f"speed: without the ssd, since {error}")
    return job


def _setting(request: ForecastRequest, device: torch.device, num_slots: int | None) -> dict[str, Any]:
    config, amounts = request.config, request.sketch.amounts
    tables = config.tables
    return {
        "data": config.data.path, "model": config.model.name, "dim": config.model.dim,
        "batch_size": config.data.batch_size, "optimizer": tables.optimizer, "policy": tables.policy,
        "device": str(device), "world": request.world, "rows": amounts.rows * request.world, "slots": num_slots,
        "record_bytes": amounts.record, "hbm": tables.hbm, "cache": tables.cache, "memory": tables.memory,
        "ssd": tables.ssd, "staging": tables.staging,
    }  # fmt: skip


def _check_rows(config: RunConfig, dataset: Dataset) -> None:
    train = dataset.schema.splits.get("train")
    if train is None or not train.rows:
        raise ConfigError(
            f"{config.data.path} has no rows to train on; its splits are {list(dataset.schema.splits)}. "
            "`hotbed prepare` makes a train split."
        )
    if not dataset.schema.features:
        raise ConfigError(f"{config.data.path} has no id features: there are no tables to plan for.")


def _together(rooms: list[Room]) -> Room | None:
    """What all groups get together; None if nothing is known."""
    if not rooms:
        return None
    slots, held = [room.num_slots for room in rooms], [room.place.memory_slots or 0 for room in rooms]
    place = rooms[0].place._replace(memory_slots=sum(held))
    return rooms[0]._replace(num_slots=None if None in slots else sum(one or 0 for one in slots), place=place)


def _too_small(request: ForecastRequest, rooms: list[Room]) -> list[str]:
    """Caches that do not hold a batch."""
    counted = BatchSample(
        "train", request.config.data.batch_size, request.replay.trace.num_batches, request.num_batches
    )
    return [
        str(
            too_small(
                counted,
                seen.replay.trace.most_keys,
                room.num_slots,
                request.sketch.amounts,
                on_ssd=_is_cache(room),
                part=room.cache_part,
            )
        )
        for seen, room in zip(request.seen, rooms)
        if room.num_slots is not None and seen.replay.trace.most_keys > room.num_slots
    ]


def _too_much_to_move(request: ForecastRequest, rooms: list[Room], cuda: bool) -> list[str]:
    """Batches whose rows cannot be on their way together."""
    each = staged_row_bytes(request.sketch.amounts.record, "cuda" if cuda else "cpu")
    problems = []
    for seen, room in zip(request.seen, rooms):
        most, needed = memory.staged_rows(room, cuda), seen.replay.trace.most_keys
        if most is not None and needed > most:
            enough = typed(math.ceil(with_some_to_spare(needed) * each / room.staging_part))
            problems.append(
                f"tables.staging: {request.config.tables.staging} has room for {most:,} rows on their way ({in_words(each)} "
                f"each), and a batch needs {needed:,}. Take {enough} or more, or smaller batches (--batch-size)"
            )
    return problems


def _is_cache(room: Room) -> bool:
    """Whether memory over an ssd is the cache."""
    return room.place.folder is not None and not room.place.memory_slots


def _traffic(request: ForecastRequest, number: int, room: Room, cuda: bool) -> RowTraffic:
    """The traffic of one group."""
    course, seen, num_slots = request.course, request.seen[number], room.num_slots or 0
    course = course._replace(ahead=course.ahead._replace(staged=memory.staged_rows(room, cuda)))
    traffic = simulate_run(seen, num_slots, course)
    if room.place.folder is None:
        return traffic
    if not room.place.memory_slots:  # memory is the cache
        return with_memory(traffic, traffic)
    below = simulate_run(seen, num_slots + room.place.memory_slots, course._replace(policy="lru"))
    return with_memory(traffic, below)


def _notes(traffic: RowTraffic, request: ForecastRequest) -> list[str]:
    epoch = request.num_batches
    notes = []
    if traffic.num_simulated < min(epoch, traffic.num_batches):
        notes.append(
            f"hit rates: the first {traffic.num_simulated:,} of {epoch:,} batches of an epoch were simulated; the others are "
            f"estimated from the counts of all ids, as if in random order: right to {100 * traffic.within:.1f} points"
        )
    if len(request.groups) > 1:
        notes.append(
            "hit rates: tables of dynamic ids have a cache of their own; each is simulated as if it were alone"
        )
    elif traffic.num_batches > epoch and traffic.num_simulated == epoch:
        notes.append("hit rates: later epochs are a second pass over the same batches, with a warm cache")
    return notes


def _shape(request: ForecastRequest, is_needed: bool) -> BatchShape:
    config, schema = request.config, request.dataset.schema
    width = next(iter(request.sketch.tables.values())).dim
    samples = -(-config.data.batch_size // request.world)
    lookups, keys = float(samples * len(schema.features)), 0.0
    if is_needed:
        trace = request.replay.trace
        count = max(trace.num_batches, 1)
        lookups, keys = trace.num_lookups / count, trace.keys.shape[0] / count
    return BatchShape(samples, len(schema.features), len(schema.dense), lookups, keys, width)


def _parts(
    request: ForecastRequest, room: Room | None, traffic: RowTraffic | None, shape: BatchShape, dense: int, cuda: bool
) -> list[MemoryPart]:
    amounts, ahead = request.sketch.amounts, request.ahead
    parts = []
    if room is None or room.num_slots is None:
        parts.append(MemoryPart("device", "rows", amounts.whole, True))
        far = READ_AHEAD
    else:
        slots = room.num_slots
        cells = memory.recorded_cells(slots, shape, ahead) if cuda or traffic is None else float(traffic.num_cells)
        index = memory.index_bytes(slots, cells, cuda)
        parts += [MemoryPart("device", "rows in the cache", slots * amounts.record, True)]
        parts += [MemoryPart("device", "index of the cache", index, ahead.bounded and not cuda)]
        far = memory.batches_ahead(slots, shape, ahead)
        parts += _below(request, room) + _in_transit(request, room, shape, cuda)
    where = "device" if cuda else "memory"
    far = min(far, request.num_batches)  # not beyond the epoch
    parts.append(MemoryPart(where, "batches ahead", far * memory.batch_bytes(shape), False))
    parts.append(MemoryPart("device", "vectors and gradients", memory.vector_bytes(shape), False))
    parts.append(MemoryPart("device", "model and its optimizer", dense, True))
    return parts


def _in_transit(request: ForecastRequest, room: Room, shape: BatchShape, cuda: bool) -> list[MemoryPart]:
    """Buffers of rows on their way, and on CUDA of the planner: outside of the other budgets."""
    parts, record, given = [], request.sketch.amounts.record, request.config.tables
    if not memory.is_direct(room, cuda):
        budget = float(parse_bytes(given.staging, "tables.staging")) if given.staging else None
        moved = memory.transit_bytes(_first_window(request, room, shape, cuda), record, cuda)
        for tier in ("memory", "device") if cuda else ("memory",):
            num_bytes = moved if budget is None else min(budget, moved)
            if cuda and tier == "memory" and request.world == 1:
                most = int(shape.lookups) * (given.window or MOST_BATCHES)
                num_bytes = memory.ring_bytes(min(room.num_slots or 0, most), record, room.staged_rows)
            parts.append(MemoryPart(tier, memory.ON_THEIR_WAY, num_bytes, False))
    if cuda and request.world == 1:
        key_bytes = 4 if request.sketch.amounts.rows < 1 << 31 else 8
        on_device, on_host = memory.planner_bytes(shape, room.num_slots or 0, given.window or None, key_bytes=key_bytes)
        parts.append(MemoryPart("device", "planner", on_device, False))
        parts.append(MemoryPart("memory", "lists of the planner", on_host, False))
    return parts


def _first_window(request: ForecastRequest, room: Room, shape: BatchShape, cuda: bool) -> int:
    """Distinct rows of the first window: an empty cache misses them all."""
    trace, slots = request.replay.trace, room.num_slots or 0
    num_keys = np.diff(trace.offsets[:31]).tolist()
    staged = memory.staged_rows(room, cuda)
    length = window_length(num_keys, slots, request.config.tables.window or None, staged) if num_keys else 0
    return int(np.unique(trace.keys[: trace.offsets[length]]).size)


def _below(request: ForecastRequest, room: Room) -> list[MemoryPart]:
    """Tiers below the cache, once every row that occurs was used."""
    amounts = request.sketch.amounts
    used = min(amounts.rows, request.sketch.most_used)
    if room.place.folder is None:
        return [MemoryPart("memory", "rows below the cache", used * amounts.below + amounts.rows, True)]
    held = room.place.memory_slots or 0
    parts = (
        [MemoryPart("memory", "rows over the ssd", held * (amounts.record + tiered.BYTES_PER_SLOT), True)]
        if held
        else []
    )
    parts.append(
        MemoryPart(
            "memory", "index of the ssd", amounts.rows * (tiered.BYTES_PER_KEY if held else SSD_BYTES_PER_KEY), True
        )
    )
    parts.append(MemoryPart("ssd", "rows", used * (amounts.record + RECORD_HEAD), False))
    return parts


def _measured_parts(known: Calibration, request: ForecastRequest, shape: BatchShape, dense: int) -> list[MemoryPart]:
    """CUDA: what kernels and the model take in addition to the known parts, which were present in the measurement."""
    if not known.peak_bytes:
        return []
    there = CALIBRATED_AHEAD * memory.batch_bytes(shape) + memory.vector_bytes(shape) + dense
    if is_cached(request.sketch):  # it had a cache for one batch, and windows of one
        slots, record = request.replay.trace.most_keys, request.sketch.amounts.record
        there += memory.planner_bytes(shape, slots, None, key_bytes=4)[0]
        there += memory.transit_bytes(slots, record, cuda=True)
    return [MemoryPart("device", memory.WORKSPACE, max(0.0, known.peak_bytes - there), False)]


def _calibration(request: ForecastRequest) -> Calibration | None:
    """The calibration of a rank, which has its part of the batch."""
    if request.calibrate == "no":
        return None
    data = request.config.data
    part = dataclasses.replace(data, batch_size=-(-data.batch_size // request.world))
    config = dataclasses.replace(request.config, data=part)
    if request.calibrate == "known":
        return known_calibration(config, request.dataset, request.sketch)
    return calibrate(
        config, request.dataset, request.sketch, again=request.calibrate == "again", short=request.calibrate == "short"
    )


def _job(
    request: ForecastRequest,
    traffic: RowTraffic | None,
    num_slots: int | None,
    shape: BatchShape,
    wires: Wires | None,
    cuda: bool,
) -> StepJob:
    config = request.config
    epoch = request.num_batches
    steps = epoch * config.train.epochs
    steps = min(steps, config.train.max_steps) if config.train.max_steps else steps
    far = 4
    if num_slots is not None and is_cached(request.sketch):
        ahead = request.ahead
        far = look_ahead_for(int(shape.keys), num_slots, ahead.look_ahead, ahead.bounded)[1]
    planning = 0.0
    if traffic is not None and num_slots is not None and not cuda:
        planning = _planning(request, traffic, num_slots)
    return StepJob(
        samples=config.data.batch_size,
        num_steps=steps,
        record=request.sketch.amounts.record,
        num_slots=num_slots,
        batches_ahead=far,
        cuda=cuda,
        num_epochs=-(-steps // epoch),
        planning=planning,
        network=0.0 if wires is None else wires.seconds,
    )


def _planning(request: ForecastRequest, traffic: RowTraffic, num_slots: int) -> float:
    """Seconds to plan a batch of the run, measured at this size."""
    trace, tables = request.replay.trace, request.config.tables
    last = max(0, trace.num_batches - 2)
    counts = trace.counts[trace.offsets[last] : trace.offsets[last + 1]]
    num_keys = int(counts.shape[0])
    window = window_length([num_keys] * 30, num_slots, tables.window or None)
    share = min(1.0, traffic.misses * window / max(traffic.keys * window, 1))
    return plan_seconds(num_slots, traffic.num_cells, counts, share, window, tables.policy)
