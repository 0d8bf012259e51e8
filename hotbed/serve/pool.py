"""Bodies of requests in, bodies of answers out, by a few threads; requests that wait are scored together.

A thread takes whatever waits, up to 16 requests: alone when it is idle, so that nothing is ever delayed; together when requests
come faster, which costs less for each. One request's mistake is its own: where a batch fails, its requests are scored alone.
"""

from __future__ import annotations

import logging
import threading
from asyncio import AbstractEventLoop, Future
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import NamedTuple

import numpy as np
import orjson
import torch

from hotbed.errors import HotbedError, IdError, StoreError
from hotbed.scorer import Scorer
from hotbed.scorer.live import Live
from hotbed.scorer.scorer import probabilities
from hotbed.serve.encode import QuestionEncoder
from hotbed.serve.limits import Limits, RequestError
from hotbed.serve.metrics import Metrics
from hotbed.serve.openapi import example_of
from hotbed.serve.question import Question, read_question
from hotbed.types import Batch, Jagged

_TOGETHER = 16  # requests
_log = logging.getLogger("hotbed.serve")


class Answer(NamedTuple):
    """Of one request."""

    status: int
    body: bytes


@dataclass
class Job:
    """A request on its way."""

    body: bytes
    answer: Future[Answer]
    given_up: bool = False  # nobody waits for the answer any more


class Pool:
    """The threads that score."""

    def __init__(self, scorer: Scorer, limits: Limits, metrics: Metrics, threads: int) -> None:
        self._scorer, self._limits, self._metrics = scorer, limits, metrics
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._encoder: tuple[Live, QuestionEncoder] | None = None
        self._loop: AbstractEventLoop | None = None
        self._threads = [threading.Thread(target=self._work, name=f"score-{n}", daemon=True) for n in range(threads)]

    def start(self, loop: AbstractEventLoop) -> None:
        """Answers are delivered to this loop."""
        self._loop = loop
        for thread in self._threads:
            thread.start()

    def warm(self) -> None:
        """Score something before anybody waits: what is compiled or loaded on first use takes seconds."""
        live = self._scorer.live
        encoder, tree = self._encoder_of(live), example_of(live.schema)
        known = tree["context"] | {name: values[0] for name, values in tree["candidates"].items()}
        with suppress(HotbedError):  # the example may be no id of this model
            live.logits(joined([encoder.batch(Question(1, known, {}))] * 2))
        for name in known:
            for value in (None, "1", 1, 1.5, ["1"], [1]):  # every way that a column may take, and its refusal
                with suppress(RequestError):
                    encoder.batch(Question(2, {**known, name: None}, {name: [value, value]}))
                    encoder.batch(Question(2, {**known, name: value}, {}))

    def submit(self, job: Job) -> None:
        self._queue.put(job)

    def stop(self) -> None:
        """Once all that waits is done."""
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

    def _answers(self, jobs: Sequence[Job]) -> list[tuple[Job, Answer]]:
        """An answer to every job, whatever happens."""
        live = self._scorer.live
        encoder = self._encoder_of(live)
        answers: list[tuple[Job, Answer]] = []
        ready: list[tuple[Job, Batch]] = []
        for job in jobs:
            try:
                question = read_question(job.body, live.encoder.names, self._limits)
                ready.append((job, encoder.batch(question)))
            except RequestError as refused:
                answers.append((job, _refusal(refused)))
            except Exception:
                answers.append((job, _broken()))
        if ready:
            try:
                answers += self._scored(live, ready)
            except Exception:  # one of them may be the cause
                for one in ready:
                    answers += self._scored_alone(live, one)
        return answers

    def _scored(self, live: Live, ready: Sequence[tuple[Job, Batch]]) -> list[tuple[Job, Answer]]:
        scored = live.logits(joined([batch for _, batch in ready]))
        scores = probabilities(scored)
        if not np.isfinite(scores).all():
            raise RequestError(503, "the model gives scores that are no numbers; it has diverged in training")
        answers, start = [], 0
        for job, batch in ready:
            some = scores[start : start + batch.size]
            start += batch.size
            body = orjson.dumps({"scores": some, "model": scored.version}, option=orjson.OPT_SERIALIZE_NUMPY)
            answers.append((job, Answer(200, body)))
        self._metrics.scored(len(ready), start)
        return answers

    def _scored_alone(self, live: Live, one: tuple[Job, Batch]) -> list[tuple[Job, Answer]]:
        try:
            return self._scored(live, [one])
        except RequestError as refused:
            return [(one[0], _refusal(refused))]
        except IdError as error:
            return [(one[0], _refusal(RequestError(422, str(error))))]
        except (StoreError, HotbedError) as error:
            _log.error("a request could not be scored: %s", error)
            return [
                (one[0], _refusal(RequestError(503, "the rows of the model cannot be read; see the log of the server")))
            ]
        except Exception:
            return [(one[0], _broken())]

    def _encoder_of(self, live: Live) -> QuestionEncoder:
        known = self._encoder
        if known is None or known[0] is not live:
            known = self._encoder = (live, QuestionEncoder(live.encoder))
        return known[1]

    def _deliver(self, answers: list[tuple[Job, Answer]]) -> None:
        def deliver() -> None:
            for job, answer in answers:
                if not job.answer.done():
                    job.answer.set_result(answer)

        assert self._loop is not None, "the pool has started"
        with suppress(RuntimeError):  # the loop has ended: nobody waits
            self._loop.call_soon_threadsafe(deliver)


def joined(batches: Sequence[Batch]) -> Batch:
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


def _refusal(refused: RequestError) -> Answer:
    return Answer(refused.status, orjson.dumps(refused.document))


def _broken() -> Answer:
    """What nobody has thought of: told to the log, with its traceback, and to the client without."""
    _log.exception("a request met a bug")
    return Answer(500, orjson.dumps({"error": "the server has a bug; its log says more"}))
