"""Batches in, a trained model out: steps, lines, evaluations, checkpoints, in this order and between two steps only.

Where a run stands is one Progress, always whole between steps, so it can stop and resume anywhere: in the middle of an
epoch, before an evaluation that was cut short, after its end (to train longer). A checkpoint holds nothing that the end
of a run does (its last short line, its last evaluation), so going on gives the bits of a run that never stopped.

Of several ranks all go through the same loop; rank 0 writes the files, and what decides about the next step is agreed on.

A run that follows a log (follow.py) has a loader without a last batch: it yields what has arrived, and the run waits for more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
from torch import nn

from hotbed.checkpoint import Policy
from hotbed.data.loader.loader import Loader
from hotbed.errors import HotbedError, RunError
from hotbed.models.base_rate import Positives, held_out_shift, mean_shift, output_bias
from hotbed.telemetry.observer import Best, MetricsLog, NoLog, Observer, Progress, Record
from hotbed.train.checkpoint import BestWeights, checkpoint_root, has_checkpoint, load_checkpoint, state_of
from hotbed.train.evaluation import NO_BREAKDOWN, Evaluation, evaluate
from hotbed.train.first_use import load_cuda, load_kernels, load_reader, make_pages
from hotbed.train.follow import Follower, hour_lines
from hotbed.train.interval import Interval, RunClock
from hotbed.train.metrics import Breakdown
from hotbed.train.ranks import RankSaver, first_bad, summary_of
from hotbed.train.settings import LearningCourse, Loaders, StepIntervals
from hotbed.train.step import Learner
from hotbed.train.watch import Ids, Watch, ids_of
from hotbed.types import Batch

INTERRUPTED = "interrupted"


class Training:
    """One run from its start, or from its checkpoint, to its end."""

    def __init__(
        self,
        run: Path,
        learner: Learner,
        loaders: Loaders,
        pace: StepIntervals,
        course: LearningCourse,
        observer: Observer,
        follower: Follower | None = None,
        breakdown: Breakdown = NO_BREAKDOWN,
    ) -> None:
        self.run = run
        self.follower = follower
        self.breakdown = breakdown
        self.learner = learner
        self.loaders = loaders
        self.pace = pace
        self.course = course
        self.observer = observer
        self.world = learner.world
        self.progress = Progress(train_rows=loaders.train.num_rows, data=loaders.train.dataset.fingerprint)
        self.progress.continue_on(self.world.size)
        if learner.compiled is not None:
            learner.compiled.say = observer.say
        self._interval = Interval()
        self._watch = Watch(learner.tables, self.world)
        policy = Policy(pace.full_every, pace.keep)
        self._saver = RankSaver(checkpoint_root(run), learner.tables, policy, observer.say, self.world)
        self._num_refused = 0  # checkpoints that the disk did not take while the run waited for more of its log
        self.unsaved = ""  # why the checkpoint of the end could not be written
        self._log: MetricsLog | NoLog | None = None
        self._last_valid: tuple[int, Evaluation] | None = None  # step, what was found
        self._restored: Best | None = None  # set when the weights are those of an earlier step
        self._last_storage: Record | None = None  # that of the last step, then
        self.clock = RunClock(learner.device)
        self._best = BestWeights(run, self.world)

    @property
    def total_steps(self) -> int:
        """0: there is no end."""
        steps = self.pace.epochs * len(self.loaders.train)
        return min(steps or self.pace.max_steps, self.pace.max_steps) if self.pace.max_steps else steps

    @property
    def log(self) -> MetricsLog | NoLog:
        if self._log is None:
            at = self.run / "metrics.jsonl", self.progress.log_position
            self._log = MetricsLog(*at) if self.world.is_first else NoLog()
        return self._log

    def resume(self) -> None:
        """Go to where the run's checkpoint was taken."""
        with self._watch.aside():
            loaded = load_checkpoint(self.run, self.learner, self.observer.say, self.follower)
            self.progress, self._interval, saved = loaded
        self._saver.go_back_to(saved)
        rows = self.loaders.train.num_rows
        if self.progress.train_rows != rows:
            raise RunError(
                f"{self.run} was trained on {self.progress.train_rows:,} rows, but its dataset now has {rows:,}. "
                "Start a new run, or bring the old dataset back."
            )
        data = self.loaders.train.dataset
        if self.progress.data not in ("", data.fingerprint):
            raise RunError(
                f"{data.path} is not what {self.run} was trained on: its ids, columns or rows have changed. "
                "Start a new run, or bring the old dataset back."
            )
        self.clock.continue_from(self.progress, len(self._interval))
        best = self.progress.best
        if self.course.keep_best and best is not None and best.step != self.progress.step:
            self._best.check(self.progress)

    def reason_to_end(self) -> str | None:
        """Why there is no further step, if so."""
        if self.course.patience and self.progress.stale >= self.course.patience:
            return f"no better valid AUC in {self.progress.stale} evaluations"
        if self.pace.max_steps and self.progress.step >= self.pace.max_steps:
            return f"max_steps {self.pace.max_steps} reached"
        if self.progress.epoch >= self.pace.epochs:
            return f"all {self.pace.epochs} epochs done" if self.pace.epochs > 1 else "the epoch is done"
        if self.follower is not None and self.follower.is_idle:
            return f"nothing new has arrived in {self.follower.loader.source.name}"
        return None

    def train(self, stop: Callable[[], bool]) -> str:
        """Step until there is a reason to end, or `stop` asks for it; save a checkpoint; return the reason."""
        if self.learner.device.type == "cpu":
            load_kernels(self.learner.tables, self.loaders.train.dataset.schema)
            make_pages(self.learner.tables)
        else:
            load_cuda(self.learner.device)
        load_reader(self.loaders.train.dataset)
        self.observer.begin(self.progress, self.total_steps)
        self.clock.begin()
        with self._watch.aside():
            self.learner.warm()
        self._watch.begin()
        best = self.progress.best
        here = best is not None and best.step == self.progress.step
        if here and not self._best.exist(self.progress):
            self._save_best()  # the run had ended here; it will leave these weights behind
        self._evaluate_if_due(stop)  # the evaluation that an interruption cut short
        if self.follower is not None:
            if self.progress.step == 0:
                self.save()  # so that a follower that is killed at any time can be resumed
            self.follower.begin(self.progress.step)
        while not stop() and self.reason_to_end() is None:
            read = self.loaders.train.epoch(self.progress.epoch, self.progress.batch, self.progress.rank_history)
            counted = self.world.counted(read)
            with (
                closing(read),
                closing(self.learner.ahead(counted)) as batches,
            ):  # what was only read ahead is read again
                leaves = False
                for batch in batches:
                    self._step(batch)
                    leaves = self.world.size > 1 and self._is_due()  # ranks settle the batches of one loader at a time
                    if leaves or self._ends_after_step(stop):
                        break
            if leaves:
                self._ends_after_step(stop)
            self._wait_for_more(stop)
        reason = INTERRUPTED if stop() else self.reason_to_end()
        self._save_last(reason)
        if self._interval and reason != INTERRUPTED:
            self._write_line()
        if self.follower is not None and reason != INTERRUPTED:
            self._write_hours(self.follower.last_hours())
        self.clock.pause(self.progress)
        assert reason is not None
        return reason

    def _ends_after_step(self, stop: Callable[[], bool]) -> bool:
        """Evaluate and save as is due; True when there is no further step."""
        self._evaluate_if_due(stop)
        if stop() or self.reason_to_end() is not None:
            return True
        due_by_step = self.pace.checkpoint_every and self.progress.step % self.pace.checkpoint_every == 0
        if due_by_step or (self.follower is not None and self.follower.is_due()):
            self.save(wait=False)
        self._poll_saver()
        return False

    def _poll_saver(self) -> None:
        """Hear of the checkpoint that was written aside; a follower takes another one if it failed."""
        num_failed = self._saver.num_failed
        if self._saver.poll():
            self._best.tidy(self.progress)
        if self.follower is not None and self._saver.num_failed > num_failed:
            self.follower.failed()

    def _wait_for_more(self, stop: Callable[[], bool]) -> None:
        """All that has arrived of a log is trained: wait for the next part of it."""
        if self.follower is None or self.reason_to_end() is not None:
            return
        self.clock.pause(self.progress)
        self.follower.wait(self.progress.step, stop, self._save_waiting, self._poll_saver)
        self.clock.resume()

    def _save_waiting(self) -> None:
        """A disk that refuses does not end a run that waits: it may have room at the next attempt."""
        assert self.follower is not None, "only a follower waits"
        try:
            self.save()
        except HotbedError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            self._num_refused += 1
            self.observer.say(f"warning: no checkpoint was written, the last one stays: {error}")
            self.follower.failed()

    def save(self, wait: bool = True) -> None:
        """Take a checkpoint, unless a loss since the last one is not finite; without `wait` it is written aside."""
        self.world.stage(f"checkpoint of step {self.progress.step}")
        self.clock.pause(self.progress)
        self._refuse_bad_loss()
        self.world.stage(f"writing the checkpoint of step {self.progress.step}", alone=wait)
        self.log.flush_to_disk()
        self.progress.log_position = self.log.position
        with self._watch.aside():
            state = state_of(self.run, self.learner, self.progress, self._interval, self.follower)
            is_taken = self._saver.save(state, wait=wait)
        if self.follower is not None and is_taken:
            self.follower.saved(self.progress.step)
        elif self.follower is not None:
            self.follower.skipped()
        if wait:
            self.world.stage(f"agreeing on the checkpoint of step {self.progress.step}")
            self._saver.prune()
            self._best.tidy(self.progress)
        self.clock.resume()

    def _save_last(self, reason: str | None) -> None:
        """Where the disk has no room for the last checkpoint, it may have some for the model, which is smaller."""
        try:
            self.save()
        except HotbedError as error:
            if reason == INTERRUPTED or self.world.size > 1 or not isinstance(error.__cause__, OSError):
                raise
            self.unsaved = str(error)
            self.observer.say(f"warning: no checkpoint of the end was written; the model is tried next: {error}")

    def storage(self, together: bool = True) -> Record:
        """For the summary: counts of the tiers and of the ids in training; None where there are none.

        Ids are those of all ranks; not `together`, as the last line of the log tells them.
        """
        return self._last_storage or {"tiers": self._watch.tiers(), "ids": self.ids(together)}

    def ids(self, together: bool = True) -> Ids | None:
        """Counts of the ids of all ranks, as the tables have them now; not `together`: as last exchanged."""
        return ids_of(self.learner.tables, self.world) if together or self.world.size == 1 else self._watch.ids

    @property
    def num_failed_checkpoints(self) -> int:
        """Those that the disk refused while training went on."""
        return self._saver.num_failed + self._num_refused + bool(self.unsaved)

    def evaluate_split(self, split: str, stop: Callable[[], bool]) -> Evaluation | None:
        """Evaluate the weights as they are and write the line, unless it is there already; None when stopped."""
        position = self.position()
        valid = split == "valid"
        if valid and self._last_valid is not None and self._last_valid[0] == position["step"]:
            return self._last_valid[1]
        self.world.stage(f"evaluating {split}")
        with self._watch.aside():
            self.learner.merge()
            found = evaluate(self.learner, self.loaders.held_out[split], stop, self.world, self.breakdown)
        if found is None:
            return None
        if not valid or (self._restored is None and self.progress.evaluated_step != self.progress.step):
            metrics = found.metrics._asdict()
            metrics["split_samples"] = metrics.pop("samples")
            self._write({"kind": "eval", **position, "split": split, **metrics})
        if valid:
            self._last_valid = (position["step"], found)
        return found

    def settle(self, stop: Callable[[], bool]) -> None:
        """After the last step: put the best weights in place if they are not the last ones."""
        best = self.progress.best
        if not self.course.keep_best or best is None or best.step == self.progress.step:
            return
        last = self.evaluate_split("valid", stop)
        if last is not None and not last.metrics.auc > best.auc:
            self._best.check(self.progress)
            self._last_storage = self.storage()
            self._best.load(self.progress, self.learner)
            self._restored = best

    def recalibrate(self, stop: Callable[[], bool]) -> None:
        """After `settle`: shift the output so that its mean over the train split is the share of positives there.

        Adaptive optimizers move as far for a small gradient as for a large one, so a rare label is predicted too seldom. Then
        by the valid split, as its rows were not learned by heart.
        """
        train, valid = self.loaders.train, self.loaders.held_out.get("valid")
        bias = output_bias(self.learner.model) if self.course.recalibrate else None
        if bias is None or not isinstance(train, Loader):  # a topic that is followed is read once
            return
        self.world.stage("calibrating")
        with self._watch.aside():
            self.learner.merge()
            learned = evaluate(self.learner, train, stop, self.world)
            if learned is None:
                return
            sampled = learned.metrics.positives / learned.metrics.samples
            shift = self.learner.sampled_shift
            self._shift(bias, mean_shift(learned.logits + shift, sampled) if self.world.is_first else None)
            found = None if valid is None else evaluate(self.learner, valid, stop, self.world)
            if found is not None and 0 < sampled < 1:
                odds = sampled / (1 - sampled) * math.exp(-shift)
                log = Positives(learned.metrics.positives, learned.metrics.positives * (1 + 1 / odds))
                here = Positives(found.metrics.positives, found.metrics.samples)
                at_random = train.dataset.schema.notes.get("split") == "random"
                found_shift = held_out_shift(found.logits, here, log, at_random=at_random)
                self._shift(bias, found_shift if self.world.is_first else None)
        self._last_valid = None

    def _shift(self, bias: nn.Parameter, shift: float | None) -> None:
        """By a number that rank 0 has."""
        with torch.no_grad():
            bias.add_(self.world.from_first(shift))

    def position(self) -> Record:
        """What the weights have seen; epochs are counted from 1."""
        at = self._restored or self.progress
        epoch = at.epoch if at is self._restored or self.progress.batch == 0 else at.epoch + 1
        return {"epoch": epoch, "step": at.step, "samples": at.samples}

    def close(self, at_once: bool = False) -> None:
        """Let the checkpoint under way be written, or give it up."""
        if at_once:
            self._saver.cancel()
        else:
            self._saver.settle()
        if self._log is not None:
            self._log.close()
        if self.follower is not None:
            self.follower.close()

    def _step(self, batch: Batch) -> None:
        progress = self.progress
        self.world.stage(f"training step {progress.step + 1}")
        self.learner.set_rate(self.course.schedule.at(progress.step) * progress.plateau)
        size = self.loaders.train.size_of(progress.batch)
        result = self.learner.step(batch, size if self.world.size > 1 else None)
        self._interval.add(result.loss, result.logits, batch.labels)
        progress.batch += 1
        progress.step += 1
        progress.samples += size
        if progress.batch == len(self.loaders.train):
            progress.epoch, progress.batch = progress.epoch + 1, 0
            progress.continue_on(self.world.size)
            self.learner.merge()
        self.world.stage(f"batch of step {progress.step + 1}")
        self.observer.step(progress)
        if self.follower is not None:
            self._write_hours(self.follower.trained(result.logits, batch.labels))
        if progress.step % self.pace.log_every == 0 or progress.batch == 0:
            self._write_line()

    def _write_line(self) -> None:
        """Close the interval with a line."""
        self.clock.pause(self.progress)
        self._refuse_bad_loss()
        if self.follower is not None:
            self.follower.hours.drain()
        summary = summary_of(self._interval, self.world)
        factor = self.learner.tables.lr_factor
        seconds, rate = self.clock.end_line(self.progress, summary.samples, len(self._interval))
        self._interval = Interval()
        self._write(
            {
                "kind": "train",
                **self.position(),
                "loss": summary.loss,
                "lr": self.learner.dense_lr * factor,
                "lr_factor": factor,
                "auc": summary.auc,
                "samples_per_s": rate,
                **self._watch.line(seconds),
            }
        )

    def _write_hours(self, records: list[Record]) -> None:
        for line in hour_lines(records, self.position()):
            self._write(line)

    def _write(self, record: Record) -> None:
        record["seconds"] = self.clock.read(self.progress)
        self.log.write(record)
        self.observer.record(record)

    def _is_due(self) -> bool:
        """Whether the valid split is evaluated now."""
        progress, every = self.progress, self.pace.eval_every
        due = progress.step % every == 0 if every else progress.batch == 0
        return "valid" in self.loaders.held_out and due and progress.evaluated_step != progress.step

    def _evaluate_if_due(self, stop: Callable[[], bool]) -> None:
        progress = self.progress
        if not self._is_due():
            return
        self.clock.pause(self.progress)
        found = self.evaluate_split("valid", stop)
        if found is not None:
            progress.evaluated_step = progress.step
            self._judge(found.metrics.auc)
        self.clock.resume()

    def _judge(self, auc: float) -> None:
        """Is it the best so far? If not, slow down, and count."""
        progress = self.progress
        if not math.isnan(auc) and (progress.best is None or auc > progress.best.auc):
            progress.best, progress.stale = Best(auc, **self.position()), 0
            if self.reason_to_end() is None:  # else the weights stay as they are, and the model is written from them
                self._save_best()
        else:
            progress.stale += 1
            progress.plateau *= self.course.plateau_factor

    def _save_best(self) -> None:
        if not self.course.keep_best:
            return
        self.world.stage("writing the best weights")
        with self._watch.aside():
            self._best.save(self.progress, self.learner)

    def _refuse_bad_loss(self) -> None:
        offset = first_bad(self._interval, self.world)
        if offset is None:
            return
        step = self.progress.step - len(self._interval) + 1 + offset
        way_back = ""
        self._saver.settle()
        if has_checkpoint(self.run):
            way_back = f" `hotbed train --resume {self.run} --set ...` resumes from the last good checkpoint."
        raise RunError(
            f"the loss is no longer a number at step {step}: training has diverged. Lower tables.lr or dense.lr, set "
            f"tables.clip_norm, warm up (train.schedule=warmup), or look for huge dense features.{way_back}"
        )
