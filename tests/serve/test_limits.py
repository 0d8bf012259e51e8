"""How many requests a server answers at once, counted inside one process."""

import asyncio
import json

from hotbed.serve.app import _ScoreEndpoint
from hotbed.serve.board import Board
from hotbed.serve.metrics import ServerMetrics
from hotbed.serve.pool import Answer
from hotbed.serve.request import Limits


class Waiting:
    """A pool that scores when it is told to."""

    def __init__(self, limits):
        self.jobs, self.limits, self.metrics = [], limits, ServerMetrics(Board(1))

    def submit(self, job):
        self.jobs.append(job)

    def score_all(self):
        for job in self.jobs:
            job.answer.set_result(Answer(200, b"{}"))
        self.jobs.clear()


async def ask(score):
    """(status, document) of one request."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"{}"}

    async def send(message):
        sent.append(message)

    await score({"headers": []}, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


async def crowd(limit):
    """The answers to `limit` requests that wait, to two more, and to one after they are scored."""
    pool = Waiting(Limits(in_flight=limit))
    metrics, score = pool.metrics, _ScoreEndpoint(pool)
    waiting = [asyncio.create_task(ask(score)) for _ in range(limit)]
    while len(pool.jobs) < limit:
        await asyncio.sleep(0)
    refused = [await ask(score) for _ in range(2)]
    assert metrics.board.in_flight == limit
    pool.score_all()
    answers = [await task for task in waiting]
    after = asyncio.create_task(ask(score))
    while not pool.jobs:
        await asyncio.sleep(0)
    pool.score_all()
    return answers, refused, await after, metrics.board.in_flight


def test_as_many_requests_as_the_limit_wait_and_no_more():
    for limit in (1, 3):
        answers, refused, after, left = asyncio.run(asyncio.wait_for(crowd(limit), 60))
        assert answers == [(200, {})] * limit
        assert refused == [(503, {"error": "too many requests at once", "limit": limit})] * 2
        assert after == (200, {})
        assert left == 0


def test_requests_that_took_too_long_leave_no_body_behind():
    """Scoring may take long, and clients ask again and again: what waits is not counted as in flight any more."""
    pool = Waiting(Limits(in_flight=2, seconds=0.001))
    score = _ScoreEndpoint(pool)
    for _ in range(5):
        assert asyncio.run(ask(score))[0] == 503
    assert [(job.given_up, job.body) for job in pool.jobs] == [(True, b"")] * 5
