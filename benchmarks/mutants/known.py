"""Changes that tests once did not notice, or noticed by chance, each with the test that must notice it now.

To add one: the file, the text as it is (it must be there once), the text it becomes, and the test without its parameters.
`python -m benchmarks.mutants --known` makes them all.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

from benchmarks.mutants.changes import Change


class KnownChange(NamedTuple):
    """One change; `test` is empty until there is one."""

    what: str
    file: str
    old: str
    new: str
    test: str = ""


KNOWN = (
    KnownChange(
        "rank gradients are not weighted by their share",
        "hotbed/train/step.py", "share = batch.size / global_size", "share = 1.0",
        "tests/distributed/test_step.py::test_a_step_of_uneven_ranks_is_that_of_one_process",
    ),
    KnownChange(
        "padding is ignored where ids are hashed",
        "hotbed/ops/keys/numba.py", "if padded and value == pad:", "if padded and not hashed and value == pad:",
        "tests/ops/test_keys.py::test_padding_is_padding_where_ids_are_hashed",
    ),
    KnownChange(
        "a row that is forgotten and written again is not kept for an open snapshot",
        "hotbed/store/memory.py", "        self.keep(keys)\n", "        pass\n",
        "tests/store/test_memory.py::test_a_row_that_is_forgotten_while_it_is_held_is_given_as_it_was",
    ),
    KnownChange(
        "flush loses a row of every full chunk",
        "hotbed/tables/group/cached.py", "part = slice(start, start + CHUNK)", "part = slice(start, start + CHUNK - 1)",
        "tests/tables/test_snapshot.py::test_every_changed_row_of_every_chunk_is_written_back",
    ),
    KnownChange(
        "patience is not reset by a new best",
        "hotbed/train/loop.py", "progress.best, progress.stale = Best(auc, **self.position()), 0",
        "progress.best = Best(auc, **self.position())",
        "tests/train/test_run.py::test_a_new_best_starts_patience_anew",
    ),
    KnownChange(
        "the manifest is not synced",
        "hotbed/checkpoint/write.py", "flush_to_disk(new / MANIFEST)", "pass",
        "tests/power/test_checkpoints.py::test_the_first_checkpoint_of_a_run",
    ),
    KnownChange(
        "the folder of checkpoints is not synced",
        "hotbed/checkpoint/write.py", "os.replace(new, root / name)\n            flush_to_disk(root)",
        "os.replace(new, root / name)",
        "tests/power/test_checkpoints.py::test_the_first_checkpoint_of_a_run",
    ),
    KnownChange(
        "samples are in the same order in every epoch",
        "hotbed/data/loader/loader.py",
        "key_of(self._seed, epoch, 1 + block.number)", "key_of(self._seed, 0, 1 + block.number)",
        "tests/data/test_loader.py::test_samples_of_one_block_are_in_another_order_every_epoch",
    ),
    KnownChange(
        "row groups are in the same order in every epoch",
        "hotbed/data/loader/loader.py", "key_of(self._seed, epoch, 0)", "key_of(self._seed, 0, 0)",
        "tests/data/test_loader.py::test_row_groups_are_in_another_order_every_epoch",
    ),
    KnownChange(
        "first uses of warm rows are not reported in a replay",
        "hotbed/forecast/replay.py", "            self._set_first_uses()\n", "            pass\n",
        "tests/forecast/test_simulate.py::test_hot_rows_in_training",
    ),
    KnownChange(
        "the byte of state of a row is not counted",
        "hotbed/tables/sizing/budget.py", 'sum((rows or 0) * (record + 1)', 'sum((rows or 0) * record',
        "tests/tables/sizing/test_budget.py::test_host_memory_counts_the_byte_that_says_whether_a_row_was_written",
    ),
    KnownChange(
        "a window that fills its room exactly is cut",
        "hotbed/cache/window.py", "total > room", "total >= room",
        "tests/cache/test_window.py::test_window_length",
    ),
    KnownChange(
        "the server takes one request too many",
        "hotbed/serve/app.py", "self._metrics.board.in_flight >= self._limits.in_flight",
        "self._metrics.board.in_flight > self._limits.in_flight",
        "tests/serve/test_limits.py::test_as_many_requests_as_the_limit_wait_and_no_more",
    ),
    KnownChange(
        "no room is kept for the copy that compaction makes",
        "hotbed/store/ssd/store.py", "self._limit = max_bytes - segment_bytes", "self._limit = max_bytes",
        "tests/store/test_ssd_cap.py::test_rows_leave_a_segment_for_compaction",
    ),
    KnownChange(
        "the best weights of now are removed",
        "hotbed/train/checkpoint.py", "for step in best_steps(self._run)} | {self._folder(progress).name}",
        "for step in best_steps(self._run)}",
        "tests/run/test_folder.py::test_best_weights_stay_as_long_as_a_checkpoint_counts_on_them",
    ),
    KnownChange(
        "a file of ids that are gone stays open when it cannot be written",
        "hotbed/checkpoint/write.py", "        if file is not None:\n            file.abandon()\n        raise",
        "        if file is None:\n            file.abandon()\n        raise",
        "tests/checkpoint/test_faults.py::test_ids_that_are_gone_and_cannot_be_listed",
    ),
    KnownChange(
        "checkpoints that add to others do not say which ids are gone",
        "hotbed/tables/snapshot/snapshot.py", "for keys in self._keys if self._touched else ():",
        "for keys in self._keys if not self._touched else ():",
        "tests/tables/test_snapshot_ids.py::test_ids_that_are_gone_are_in_the_checkpoints_that_add_to_others",
    ),
    KnownChange(
        "an id that finds its bucket full goes to the first one",
        "hotbed/ids/cells.py", "if bucket == end:", "if bucket != end:",
        "tests/ids/test_index.py::test_ids_made_to_collide",
    ),
    KnownChange(
        "keys of one batch that was taken back are used again",
        "hotbed/tables/group/dynamic.py", "self._epoch += self.num_ahead > 0", "self._epoch += self.num_ahead > 1",
        "tests/tables/test_dynamic.py::test_keys_of_a_batch_that_was_taken_back_are_used_no_more",
    ),
    KnownChange(
        "uses of rows in memory are all forgotten at once",
        "hotbed/store/tier_kernels.py", "np.int64(aged(info[hand, USES], age, half))", "np.int64(0)",
        "tests/store/test_tiered.py::test_rows_used_least_leave_and_old_uses_count_less",
    ),
    KnownChange(
        "ids by name and bags are taken together",
        "hotbed/tables/descriptions.py", "not isinstance(given, Mapping) or bags is not None or",
        "not isinstance(given, Mapping) and bags is not None or",
        "tests/pipeline/test_choice.py::test_ids_by_name_come_without_bags_and_other_things_are_no_ids",
    ),
    KnownChange(
        "weights are ignored where all bags of a group have some",
        "hotbed/tables/descriptions.py", "any(kinds[place] == WEIGHTED", "any(kinds[place] != WEIGHTED",
        "tests/tables/test_recorded_lookups.py::test_a_group_whose_bags_all_have_weights",
    ),
    KnownChange(
        "a rank that never gave a sign of life is not named",
        "hotbed/parallel/world.py", 'said.append(f"rank {rank} has never given a sign of life")', "pass",
        "tests/distributed/test_world.py::test_ranks_that_are_silent_stand_still_or_are_behind_are_named",
    ),
    KnownChange(
        "tables that differ between ranks are accepted",
        "hotbed/parallel/order.py", 'self.meet("makes its tables")', "return",
        "tests/distributed/test_order.py::test_tables_that_differ_are_refused_on_all_ranks",
    ),
    KnownChange(
        "auto takes the slower mode",
        "hotbed/parallel/auto.py", "replicated.seconds < sharded.seconds", "replicated.seconds > sharded.seconds",
        "tests/distributed/test_auto.py::test_the_faster_mode_is_chosen",
    ),
    KnownChange(
        "best weights are counted where there are none",
        "hotbed/train/disk_room.py", "num_looks > 1 and begins", "num_looks > 1 or begins",
        "tests/train/test_disk_room.py::test_best_weights_are_counted_where_there_will_be_some",
    ),
    KnownChange(
        "one of two ranks tells of its own samples alone",
        "hotbed/train/ranks.py", "    if world.size == 1:\n        return interval.summary()",
        "    if world.size == 2:\n        return interval.summary()",
        "tests/train/test_ranks.py::test_two_ranks_tell_of_all_their_samples",
    ),
    KnownChange(
        "memory of windows that are taken back may be used again while the device reads it",
        "hotbed/pipeline/feed.py", "        for window in self._decided:\n            self._retire(window)\n", "",
        "tests/pipeline/test_feed.py::test_windows_that_are_taken_back_are_kept_until_the_device_is_past_them",
    ),
    KnownChange(
        "one large batch makes all later ones wait",
        "hotbed/cache/index.py", "self._usual - self._usual // 8", "self._usual + self._usual // 8",
        "tests/cache/test_index.py::test_one_large_batch_does_not_make_later_ones_wait",
    ),
    KnownChange(
        "a bounded index does not know how full it is",
        "hotbed/cache/index.py", "\"\n        live = self.count_live(wait=True)",
        "\"\n        live = self.count_live(wait=False)",
        "tests/cache/test_index.py::test_a_bounded_index_counts_every_batch_before_it_takes_another",
    ),
    KnownChange(
        "cells that windows freed are counted only when somebody has read them",
        "hotbed/cache/recorded_planner.py", "self._uncounted[0].is_read\n            or windows",
        "self._uncounted[0].is_read\n            and windows",
        "tests/cache/test_cache.py::test_a_recorded_cache_counts_what_windows_freed_whether_or_not_anybody_read_them",
    ),
    KnownChange(
        "a file that died before an interrupted read stays when its store is closed",
        "hotbed/store/ssd/segments.py", "self._active.clear()", "pass",
        "tests/store/test_ssd.py::test_a_dead_file_goes_with_its_store_whatever_an_interrupted_reader_left",
    ),
    KnownChange(
        "the last key of a block is not cleared",
        "hotbed/store/ssd/places.py", "self.words[start : start + (1 << BLOCK)] = 0",
        "self.words[start : start + (1 << BLOCK) - 1] = 0",
        "tests/store/test_ssd.py::test_nothing_is_left_of_a_block_of_keys_that_is_cleared",
    ),
    KnownChange(
        "key 0 is not read back into memory",
        "hotbed/store/tiered.py", "np.flatnonzero(held.keys >= 0)", "np.flatnonzero(held.keys >= 1)",
        "tests/store/test_tiered.py::test_rows_of_a_checkpoint_are_back_in_the_slots_they_had",
    ),
    KnownChange(
        "the id in row 0 counts as one without a row",
        "hotbed/ids/translator.py", "self._memory.index.find(tables, ids) >= 0",
        "self._memory.index.find(tables, ids) > 0",
        "tests/ids/test_translator.py::test_ids_that_have_a_row_of_their_own",
    ),
    KnownChange(
        "the cells of forgotten keys count as used",
        "hotbed/cache/cache.py", "self.index.count(-int(unused.shape[0]))", "pass",
        "tests/cache/test_cache.py::test_keys_that_are_gone_have_no_slot_and_no_cell_unless_a_batch_ahead_has_them",
    ),
    KnownChange(
        "a recorded cache waits for windows whose counts are there",
        "hotbed/cache/recorded_planner.py", "for batch in batches)\n        self._count()",
        "for batch in batches)\n        pass",
        "tests/cache/test_cache.py::test_a_recorded_cache_waits_for_no_window_where_counts_that_are_there_show_room",
    ),
    KnownChange(
        "every cache is bounded",
        "hotbed/tables/sizing/budget.py", "budgets.bounds_index and room", "budgets.bounds_index or room",
        "tests/tables/sizing/test_budget.py::test_the_index_of_a_cache_is_bounded_where_its_bytes_are_given",
    ),
    KnownChange(
        "dynamic ids have more rows than memory holds",
        "hotbed/tables/sizing/budget.py", "IdRoom(min(most, fit), part, record + 1)",
        "IdRoom(max(most, fit), part, record + 1)",
        "tests/tables/sizing/test_budget.py::test_dynamic_ids_have_as_many_rows_as_memory_holds_with_their_index",
    ),
    KnownChange(
        "a table of one checkpoint alone is compared",
        "hotbed/checkpoint/diff.py", "if one is None or other is None:", "if one is None and other is None:",
        "tests/checkpoint/test_command.py::test_all_rows_of_a_table_that_one_checkpoint_does_not_have_are_added_or_gone",
    ),
    KnownChange(
        "leftovers are removed before their names are on the disk",
        "hotbed/checkpoint/chain.py", "    if left:\n", "    if not left:\n",
        "tests/checkpoint/test_chain.py::test_leftovers_are_removed_when_their_names_are_on_the_disk",
    ),
    KnownChange(
        "a schedule goes on after the last step",
        "hotbed/train/build.py", "min(steps, train.max_steps or steps)", "max(steps, train.max_steps or steps)",
        "tests/train/test_build.py::test_a_schedule_ends_with_the_run",
    ),
    KnownChange(
        "a run alone is not recalibrated",
        "hotbed/train/recalibrate.py", "sampled) if world.is_first else None",
        "sampled) if not world.is_first else None",
        "tests/train/test_run.py::test_a_recalibrated_model_predicts_the_share_of_positives",
    ),
    KnownChange(
        "what was read of a list is kept",
        "hotbed/pipeline/reader.py", "self._launched and self._finished and is_stream",
        "self._launched or self._finished and is_stream",
        "tests/pipeline/test_reader.py::test_nothing_is_kept_of_a_loader_that_can_be_read_again",
    ),
    KnownChange(
        "batches that arrive together have each other's counts",
        "hotbed/pipeline/recorded.py", "_replace(place=number + i)", "_replace(place=number - i)",
        "tests/pipeline/test_recorded.py::test_batches_that_arrive_together_know_their_own_number_of_keys",
    ),
    KnownChange(
        "an error of another rank is not waited for",
        "hotbed/parallel/world.py", "deadline = time.monotonic() + wait", "deadline = time.monotonic() - wait",
        "tests/distributed/test_world.py::test_an_error_is_waited_for_and_no_longer_than_that",
    ),
)  # fmt: skip

# (file, before, after) as the results have them: why no test can notice.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "hotbed/ids/index.py",
        "while buckets * CELLS * _MAX_LOAD < 1.5 * capacity / NUM_SHARDS + 64:",
        "while buckets * CELLS * _MAX_LOAD < 1.5 * capacity / NUM_SHARDS - 64:",
    ): "addresses set aside, never memory: half as much again as the ids need, whatever 64 of them are",
    (
        "hotbed/store/ssd/scan.py",
        "most = max(_PIECE // stride // 64, 1) * 64 # whole words of the bitmap",
        "most = min(_PIECE // stride // 64, 1) * 64 # whole words of the bitmap",
    ): "smaller pieces read the same, more slowly",
    (
        "hotbed/checkpoint/read.py",
        "rooms = [new_room(largest) for _ in range(THREADS + 1)] # used again: fresh memory costs more than reading",
        "rooms = [new_room(largest) for _ in range(THREADS)] # used again: fresh memory costs more than reading",
    ): "one file less is read ahead",
    (
        "hotbed/checkpoint/read.py",
        "largest = max((mark.bytes for _, mark in marks), default=0)",
        "largest = max((mark.bytes for _, mark in marks), default=1)",
    ): "where there is no file, the room for one has a byte, and nobody uses it",
    (
        "hotbed/train/model_folder.py",
        "if tables.group_of(name).shard.world > 1:",
        "if tables.group_of(name).shard.world >= 1:",
    ): "the way for parts of tables takes whole ones too",
    (
        "hotbed/store/ssd/frozen.py",
        "self._release.atexit = False",
        "self._release.atexit = True",
    ): "when the process ends its files are let go anyway",
    (
        "hotbed/ids/kernels.py",
        "prefetch(owners, rows[i + _RING], 0)",
        "pass",
    ): "a hint to the processor",
    (
        "hotbed/pipeline/recorded.py",
        "group.cache.reserve(int(CELLS_FACTOR * (group.num_slots + CELLS_PER_KEY * ahead)))",
        "group.cache.reserve(int(CELLS_FACTOR * (group.num_slots - CELLS_PER_KEY * ahead)))",
    ): "the table grows later, when it must; which rows stay does not depend on its size",
    (
        "hotbed/cache/index.py",
        "return self._grow(num_cells) if num_cells > self.num_cells else None",
        "return self._grow(num_cells) if num_cells >= self.num_cells else None",
    ): "a table of the same size is laid out anew; which rows stay does not depend on it",
    (
        "hotbed/checkpoint/chain.py",
        "if time.monotonic() >= deadline:",
        "if time.monotonic() > deadline:",
    ): "one look more at a lock",
    (
        "hotbed/cache/index.py",
        "self.count_live(wait=False)",
        "pass",
    ): "counted when the next batch arrives, before anything depends on it",
    (
        "hotbed/pipeline/reader.py",
        "if len(self._found) == self._low + 1:",
        "if len(self._found) == self._low:",
    ): "the reader is woken a batch later, and looks by itself twice a second",
    (
        "hotbed/pipeline/reader.py",
        "self._full, self._low = (2 * MOST_SHARED, MOST_SHARED + 4) if self._shared else (_FULL, _LOW)",
        "self._full, self._low = (2 * MOST_SHARED, MOST_SHARED - 4) if self._shared else (_FULL, _LOW)",
    ): "reading continues some batches later; who wants one that is not there wakes the reader",
    (
        "hotbed/store/tier_kernels.py",
        'score = njit(scoring.bind({"where": _where}), name=f"score_{tag}", nogil=True)',
        'score = njit(scoring.bind({"where": _where}), name=f"score_{tag}", nogil=False)',
    ): "only compiled code calls it, which has let go of Python's lock",
    (
        "hotbed/ids/batch.py",
        "if i + _AHEAD < rows.shape[0] and rows[i + _AHEAD] >= 0:",
        "if i + _AHEAD < rows.shape[0] and rows[i + _AHEAD] >= 1:",
    ): "a hint to the processor",
    (
        "hotbed/cache/index.py",
        "if live + keys.shape[0] <= _BRIMFUL * self.num_cells:",
        "if live + keys.shape[0] < _BRIMFUL * self.num_cells:",
    ): "at equality distinct keys are counted, and the table grows only where they do not fit",
    (
        "hotbed/ids/index.py",
        "threads = 1 if ids.shape[0] < _PARALLEL else threads",
        "threads = 1 if ids.shape[0] <= _PARALLEL else threads",
    ): "one thread or many give the same",
    (
        "hotbed/store/ssd/segments.py",
        "if self._lock_handle >= 0:",
        "if self._lock_handle >= 1:",
    ): "file 0 is the standard input, and is not opened here",
    (
        "hotbed/train/step_recording.py",
        "for place, (rate, group) in enumerate(zip(self._rates, groups, strict=True)):",
        "for place, (rate, group) in enumerate(zip(self._rates, groups, strict=False)):",
    ): "both are as long: a step with other groups is recorded anew",
    (
        "hotbed/cache/index.py",
        "usual = 2 * self._usual * (len(pending) + 1) if self._usual else sum(pending) + num_lookups",
        "usual = 2 * self._usual * (len(pending)) if self._usual else sum(pending) + num_lookups",
    ): "when to count exactly; what a batch may take at most is looked at besides",
    (
        "hotbed/store/ssd/readers.py",
        "if load_acquire(job + 8 * _FAILED) == 0:",
        "if load_acquire(job - 8 * _FAILED) == 0:",
    ): "reading does not stop early after a record that is damaged; who failed first is reported all the same",
    (
        "hotbed/store/ssd/kernels.py",
        "if i + _AHEAD < keys.size:",
        "if i + _AHEAD <= keys.size:",
    ): "a hint to the processor, for whatever comes after the last key",
    (
        "hotbed/ids/kernels.py",
        "hash_ = hash_of(table, id_)",
        "hash_ = hash_of(id_, table)",
    ): "in `_ask`, a hint to the processor",
    (
        "hotbed/pipeline/reader.py",
        "while len(self._found) > self._low + 1 and not self._stopped:",
        "while len(self._found) > self._low and not self._stopped:",
    ): "reading continues a batch later; who wants one that is not there wakes the reader",
    (
        "hotbed/store/ssd/read.py",
        'return shared("hotbed-ssd", NUM_THREADS - 1, watch=0, scratch_bytes=MAX_RECORD_BYTES)',
        'return shared("hotbed-ssd", NUM_THREADS, watch=0, scratch_bytes=MAX_RECORD_BYTES)',
    ): "a thread more reads the same",
}


def known_changes(root: Path) -> list[Change]:
    """The same as changes of the sources as they are; a text that is not there once is an error."""
    return [_change(known, (root / known.file).read_bytes()) for known in KNOWN]


def _change(known: KnownChange, source: bytes) -> Change:
    old = known.old.encode()
    if source.count(old) != 1:
        raise ValueError(f"{known.file} has {known.old!r} {source.count(old)} times, not once: {known.what}")
    start = source.index(old)
    line = 1 + source.count(b"\n", 0, start + len(old) - len(old.lstrip()))
    return Change(known.file, line, "known", _function_at(source, line), start, start + len(old), known.new)


def _function_at(source: bytes, line: int) -> str:
    """The innermost method or function that holds the line, as Python qualifies it."""
    name, body, inside_function = "", ast.parse(source).body, False
    while True:
        scopes = [one for one in body if isinstance(one, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
        inner = next((one for one in scopes if one.lineno <= line <= (one.end_lineno or 0)), None)
        if inner is None:
            return name
        joint = ".<locals>." if inside_function else "."
        name = f"{name}{joint}{inner.name}" if name else inner.name
        body, inside_function = inner.body, not isinstance(inner, ast.ClassDef)
