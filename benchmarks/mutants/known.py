"""Changes that tests once did not notice, or noticed by chance, each with the test that must notice it now.

To add one: the file, the text as it is (it must be there once), the text it becomes, and the test without its parameters.
`python -m benchmarks.mutants --known` makes them all.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

from benchmarks.mutants.changes import Change


class Known(NamedTuple):
    """One change; `test` is empty until there is one."""

    what: str
    file: str
    old: str
    new: str
    test: str = ""


KNOWN = (
    Known(
        "rank gradients are not weighted by their share",
        "hotbed/train/step.py", "share = batch.size / global_size", "share = 1.0",
        "tests/distributed/test_step.py::test_a_step_of_uneven_ranks_is_that_of_one_process",
    ),
    Known(
        "padding is ignored where ids are hashed",
        "hotbed/ops/keys/numba.py", "if padded and value == pad:", "if padded and not hashed and value == pad:",
        "tests/ops/test_keys.py::test_padding_is_padding_where_ids_are_hashed",
    ),
    Known(
        "a row that is forgotten and written again is not kept for an open snapshot",
        "hotbed/store/memory.py", "        self.keep(keys)\n", "        pass\n",
        "tests/store/test_memory.py::test_a_row_that_is_forgotten_while_it_is_held_is_given_as_it_was",
    ),
    Known(
        "flush loses a row of every full chunk",
        "hotbed/tables/group/cached.py", "part = slice(start, start + CHUNK)", "part = slice(start, start + CHUNK - 1)",
        "tests/tables/test_snapshot.py::test_every_changed_row_of_every_chunk_is_written_back",
    ),
    Known(
        "patience is not reset by a new best",
        "hotbed/train/loop.py", "progress.best, progress.stale = Best(auc, **self.position()), 0",
        "progress.best = Best(auc, **self.position())",
        "tests/train/test_run.py::test_a_new_best_starts_patience_anew",
    ),
    Known(
        "the manifest is not synced",
        "hotbed/checkpoint/write.py", "flush_to_disk(new / MANIFEST)", "pass",
        "tests/power/test_checkpoints.py::test_the_first_checkpoint_of_a_run",
    ),
    Known(
        "the folder of checkpoints is not synced",
        "hotbed/checkpoint/write.py", "os.replace(new, root / name)\n            flush_to_disk(root)",
        "os.replace(new, root / name)",
        "tests/power/test_checkpoints.py::test_the_first_checkpoint_of_a_run",
    ),
    Known(
        "samples are in the same order in every epoch",
        "hotbed/data/loader/loader.py",
        "key_of(self._seed, epoch, 1 + block.number)", "key_of(self._seed, 0, 1 + block.number)",
        "tests/data/test_loader.py::test_samples_of_one_block_are_in_another_order_every_epoch",
    ),
    Known(
        "row groups are in the same order in every epoch",
        "hotbed/data/loader/loader.py", "key_of(self._seed, epoch, 0)", "key_of(self._seed, 0, 0)",
        "tests/data/test_loader.py::test_row_groups_are_in_another_order_every_epoch",
    ),
    Known(
        "first uses of warm rows are not reported in a replay",
        "hotbed/forecast/replay.py", "            self._tell_first_uses()\n", "            pass\n",
        "tests/forecast/test_simulate.py::test_hot_rows_in_training",
    ),
    Known(
        "the byte of state of a row is not counted",
        "hotbed/sizing/budget.py", '"memory"), sum(rows * (record + 1)', '"memory"), sum(rows * record',
        "tests/sizing/test_budget.py::test_host_memory_counts_the_byte_that_says_whether_a_row_was_written",
    ),
    Known(
        "a window that fills its room exactly is cut",
        "hotbed/cache/window.py", "total > room", "total >= room",
        "tests/cache/test_window.py::test_window_length",
    ),
    Known(
        "the server takes one request too many",
        "hotbed/serve/app.py", "self._metrics.in_flight >= self._limits.in_flight",
        "self._metrics.in_flight > self._limits.in_flight",
        "tests/serve/test_limits.py::test_as_many_requests_as_the_limit_wait_and_no_more",
    ),
    Known(
        "no room is kept for the copy that compaction makes",
        "hotbed/store/ssd/store.py", "self._limit = max_bytes - segment_bytes", "self._limit = max_bytes",
        "tests/store/test_ssd_cap.py::test_rows_leave_a_segment_for_compaction",
    ),
    Known(
        "the best weights of now are removed",
        "hotbed/train/loop.py", "for step in best_steps(self.run)} | {self._best_folder().name}",
        "for step in best_steps(self.run)}",
        "tests/run/test_folder.py::test_best_weights_stay_as_long_as_a_checkpoint_counts_on_them",
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
        "hotbed/ids/learn.py",
        "out = np.empty(min(_SWEEP_CHUNK, end - start), dtype=np.int64)",
        "out = np.empty(min(_SWEEP_CHUNK, end + start), dtype=np.int64)",
    ): "a list that is longer than it need be",
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
        "hotbed/train/model_folder.py",
        "if tables.group_of(name).shard.world > 1:",
        "if tables.group_of(name).shard.world >= 1:",
    ): "the way for parts of tables takes whole ones too",
}


def known_changes(root: Path) -> list[Change]:
    """The same as changes of the sources as they are; a text that is not there once is an error."""
    return [_change(known, (root / known.file).read_bytes()) for known in KNOWN]


def _change(known: Known, source: bytes) -> Change:
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
