"""Request bodies in, answer bodies out, by a few threads; pending requests are scored together.

A thread takes all pending requests, up to 16. When it is idle it takes one at once, so nothing is delayed; when requests
arrive faster it scores several together, which costs less for each. If a batch fails, its requests are scored one by one, so
that one bad request does not affect the others.
"""

from __future__ import annotations

import logging
import threading
from asyncio import AbstractEventLoop, Future
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np
import orjson
import torch

from hotbed.errors import HotbedError, IdError, StoreError
from hotbed.run.predictions import scores_by_task
from hotbed.scorer import Scorer
from hotbed.scorer.live import LiveModel
from hotbed.serve.encode import RequestEncoder
from hotbed.serve.metrics import ServerMetrics
from hotbed.serve.openapi import example_of
from hotbed.serve.request import Answer, Limits, RequestError, RequestForm, ScoreRequest
from hotbed.types import Batch, Jagged

_TOGETHER = 16  # requests
_log = logging.getLogger("hotbed.serve")


@dataclass
class PendingRequest:
    """A request that has no answer yet."""

    body: bytes
    answer: Future[Answer]
    form: RequestForm
    given_up: bool = False  # the client no longer waits

    def give_up(self) -> None:
        """It may stay in the queue for as long as a batch takes, and counts as in flight no more: without its body."""
        self.given_up, self.body = True, b""


class ScoringPool:
    """The threads that score."""

    def __init__(self, scorer: Scorer, limits: Limits, metrics: ServerMetrics, threads: int) -> None:
        self._scorer, self.limits, self.metrics = scorer, limits, metrics
        self._queue: SimpleQueue[PendingRequest | None] = SimpleQueue()
        self._encoder: tuple[LiveModel, RequestEncoder] | None = None
        self._loop: AbstractEventLoop | None = None
        self._threads = [threading.Thread(target=self._work, name=f"score-{n}", daemon=True) for n in range(threads)]

    def start(self, loop: AbstractEventLoop) -> None:
        """Start the threads; answers are delivered to this loop."""
        self._loop = loop
        for thread in self._threads:
            thread.start()

    def submit(self, job: PendingRequest) -> None:
        self._queue.put(job)

    def stop(self) -> None:
        """Stop the threads once all pending requests are answered."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (first := self._queue.get()) is not None:
            jobs = [first]
            with suppress(Empty):
                while len(jobs) < _TOGETHER:
                    job = self._queue.get_nowait()
                    if job is None:
                        self._queue.put(None)
                        break
                    jobs.append(job)
            self._deliver(self._answers([job for job in jobs if not job.given_up]))

    def _answers(self, jobs: Sequence[PendingRequest]) -> list[tuple[PendingRequest, Answer]]:
        """An answer to every job, whatever happens."""
        live = self._scorer.live
        encoder = self._encoder_of(live)
        answers: list[tuple[PendingRequest, Answer]] = []
        ready: list[tuple[PendingRequest, Batch]] = []
        for job in jobs:
            try:
                request = job.form.read(job.body, live.encoder, self.limits)
                ready.append((job, encoder.batch(request)))
            except RequestError as refused:
                answers.append((job, refused.answer))
            except Exception:
                answers.append((job, _bug_answer()))
        if ready:
            try:
                answers += self._scored(live, ready)
            except Exception:  # one of them may be the cause
                for one in ready:
                    answers += self._scored_alone(live, one)
        return answers

    def _scored(
        self, live: LiveModel, ready: Sequence[tuple[PendingRequest, Batch]]
    ) -> list[tuple[PendingRequest, Answer]]:
        scored = live.logits(join_batches([batch for _, batch in ready]))
        scores = scores_by_task(scored.outputs, live.schema.labels)
        if not all(np.isfinite(one).all() for one in scores.values()):
            raise RequestError(503, "the model gives scores that are not numbers; it has diverged in training")
        answers, start = [], 0
        for job, batch in ready:
            some = {name: one[start : start + batch.size] for name, one in scores.items()}
            start += batch.size
            try:
                answers.append((job, Answer(200, job.form.write(some, scored.version))))
            except RequestError as refused:
                answers.append((job, refused.answer))
        self.metrics.scored(len(ready), start, live.rows)
        return answers

    def _scored_alone(self, live: LiveModel, one: tuple[PendingRequest, Batch]) -> list[tuple[PendingRequest, Answer]]:
        try:
            return self._scored(live, [one])
        except RequestError as refused:
            return [(one[0], refused.answer)]
        except IdError as error:
            return [(one[0], RequestError(422, str(error)).answer)]
        except (StoreError, HotbedError) as error:
            _log.error("a request could not be scored: %s", error)
            unreadable = RequestError(503, "the rows of the model cannot be read; see the log of the server")
            return [(one[0], unreadable.answer)]
        except Exception:
            return [(one[0], _bug_answer())]

    def _encoder_of(self, live: LiveModel) -> RequestEncoder:
        known = self._encoder
        if known is None or known[0] is not live:
            known = self._encoder = (live, RequestEncoder(live.encoder, self.limits))
        return known[1]

    def _deliver(self, answers: list[tuple[PendingRequest, Answer]]) -> None:
        def deliver() -> None:
            for job, answer in answers:
                if not job.answer.done():
                    job.answer.set_result(answer)

        assert self._loop is not None, "the pool has started"
        with suppress(RuntimeError):  # the loop has ended: no client waits
            self._loop.call_soon_threadsafe(deliver)


def warm(live: LiveModel) -> None:
    """Score examples before the first request: compiling and loading on first use takes seconds."""
    encoder, tree = RequestEncoder(live.encoder, Limits()), example_of(live.schema)
    known = tree["context"] | {name: values[0] for name, values in tree["candidates"].items()}
    with suppress(HotbedError):  # the example may not be an id of this model
        live.logits(join_batches([encoder.batch(ScoreRequest(1, known, {}))] * 2))
    for name in known:
        for value in (None, "1", 1, 1.5, ["1"], [1]):  # every code path of a column, and its error
            with suppress(RequestError):
                encoder.batch(ScoreRequest(2, {**known, name: None}, {name: [value, value]}))
                encoder.batch(ScoreRequest(2, {**known, name: value}, {}))


def join_batches(batches: Sequence[Batch]) -> Batch:
    """One batch of all samples, in order."""
    if len(batches) == 1:
        return batches[0]
    bags = {}
    for name in batches[0].bags:
        parts = [batch.bags[name] for batch in batches]
        starts = np.cumsum([0, *(part.values.shape[0] for part in parts)])
        offsets = [part.offsets[bool(n) :] + int(starts[n]) for n, part in enumerate(parts)]
        bags[name] = Jagged(torch.cat([part.values for part in parts]), torch.cat(offsets))
    return Batch(
        torch.cat([batch.labels for batch in batches]),
        torch.cat([batch.dense for batch in batches]),
        torch.cat([batch.ids for batch in batches]),
        bags,
    )


def _bug_answer() -> Answer:
    """The answer after an unexpected error, which is logged with its traceback."""
    _log.exception("unexpected error in a request")
    return Answer(500, orjson.dumps({"error": "the server has a bug; its log says more"}))
