"""Several processes behind one port: each scores alike, is restarted when it dies, and counts as a part of one server."""

import http.client
import json
import os
import shutil
import signal
import socket
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import orjson
import pytest

import hotbed
from hotbed.checkpoint.chain import folders_in
from hotbed.host.memory import shared_out_memory
from hotbed.run.remote_run import RunCopier
from hotbed.serve.board import Board, Writing
from tests.files.conftest import bucket, s3_server  # noqa: F401  fixtures
from tests.fresh import Program
from tests.serve.conftest import GOOD, SERVE, serving
from tests.serve.test_serve import columns_of

WORKERS = ("--workers", "2", "--memory", "2MB")
LONGEST = 30  # seconds


def workers_of(server):
    """Process ids; the parent's other processes have ended."""
    pid = server.program.pid
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def until(condition):
    end = time.monotonic() + LONGEST
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


@contextmanager
def only(pid, pids):
    """The others stand still, so that this one answers."""
    others = [one for one in pids if one != pid]
    for one in others:
        os.kill(one, signal.SIGSTOP)
    try:
        yield
    finally:
        for one in others:
            os.kill(one, signal.SIGCONT)


def answers_of_each(server):
    """What every worker answers to the same request."""
    pids, found = workers_of(server), []
    assert len(pids) == 2
    for pid in pids:
        with only(pid, pids):
            status, answer = server.score(GOOD)
            assert status == 200
            found.append(answer)
    return found


@pytest.fixture(scope="module")
def several(run_folder):
    with serving(run_folder, *WORKERS) as found:
        yield found


def test_every_worker_gives_the_same_bits_and_shares_memory(several, run_folder):
    with hotbed.load(run_folder) as scorer:
        expected = scorer.score(columns_of(GOOD))
    one, other = answers_of_each(several)
    assert one == other
    np.testing.assert_allclose(one["scores"], expected, rtol=0, atol=1e-6)
    assert several.ask("GET", "/readyz")[1].endswith(b", 2 of 2 workers\n")
    every = [shared_out_memory(pid) for pid in (several.program.pid, *workers_of(several))]
    assert several.metric("resident_bytes") == pytest.approx(sum(every), rel=0.3)


def test_counts_of_all_workers_are_added_up(several):
    pids, before = workers_of(several), several.metric('requests_total{status="200"}')
    for pid, requests in zip(pids, (3, 4), strict=True):
        with only(pid, pids):
            for _ in range(requests):
                assert several.score(GOOD)[0] == 200
    for pid in pids:
        with only(pid, pids):
            assert several.metric('requests_total{status="200"}') == before + 7
            assert several.metric("request_seconds_count") == several.metric("requests_total")
            assert several.metric("batched_requests_total") == several.metric('requests_total{status="200"}')
            assert several.metric("candidates_total") == 3 * several.metric('requests_total{status="200"}')
            assert several.metric("model_info") == several.metric("workers ") == 2
            assert several.metric("rows_bytes") <= 2_000_000


def test_a_killed_worker_comes_back_and_no_answer_is_wrong(run_folder):
    expected = None
    wrong, sums, stop = [], [], threading.Event()

    def ask():
        while not stop.is_set():
            try:
                status, answer = server.score(GOOD)
            except (OSError, http.client.IncompleteRead):  # the worker was killed, before or amid its answer
                continue
            if status != 200 or not np.allclose(answer["scores"], expected["scores"], atol=1e-6, rtol=0):
                wrong.append((status, answer))

    with serving(run_folder, *WORKERS) as server:
        expected = server.score(GOOD)[1]
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for deaths in (1, 2):
                pids = workers_of(server)
                os.kill(pids[0], signal.SIGKILL)
                until(lambda pids=pids: len(workers_of(server)) == 2 and pids[0] not in workers_of(server))
                until(lambda: b"2 of 2" in server.ask("GET", "/readyz")[1])
                assert server.metric("worker_restarts_total") == deaths
                sums.append(server.metric("requests_total"))
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        one, other = answers_of_each(server)
        assert one == other == expected
        assert server.metric("in_flight") == 0
        assert sums == sorted(sums)
    assert wrong == []
    assert "was killed by SIGKILL and is restarted" in server.program.ended().stdout


def test_a_signal_lets_all_workers_finish(run_folder):
    body = orjson.dumps(GOOD)
    with serving(run_folder, *WORKERS) as server:
        pids, slow = workers_of(server), []
        for number, pid in enumerate(pids, 1):
            with only(pid, pids):
                slow.append(socket.create_connection(("127.0.0.1", server.port), timeout=LONGEST))
                slow[-1].sendall(
                    b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:9]
                )
                until(lambda number=number: server.metric("in_flight") == number)
        server.program.signal(signal.SIGTERM)
        for one in slow:
            one.sendall(body[9:])
            assert b" 200 " in one.recv(4096)
            one.close()
        ended = server.program.ended(LONGEST)
        assert ended.returncode == 0
        assert "stopping: requests in flight are finished first" in ended.stdout
        assert ended.stdout.rstrip().endswith("stopped")
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_newer_model_reaches_all_workers_and_their_successors(run_folder, tmp_path):
    folder, steps = tmp_path / "run", folders_in(run_folder / "checkpoints")
    shutil.copytree(run_folder, folder, ignore=shutil.ignore_patterns("checkpoints", "model"))
    (folder / "checkpoints").mkdir()
    shutil.copytree(steps[0], folder / "checkpoints" / steps[0].name)
    expected = []
    for one in steps:
        with hotbed.load(one) as scorer:
            expected.append((scorer.version, scorer.score(columns_of(GOOD))))

    def check(number):
        version, scores = expected[number]
        one, other = answers_of_each(server)
        assert one == other
        assert one["model"] == version
        np.testing.assert_allclose(one["scores"], scores, rtol=0, atol=1e-6)

    with serving(folder, *WORKERS) as server:
        check(0)
        for number, one in enumerate(steps[1:], 1):
            shutil.copytree(one, folder / "checkpoints" / one.name)
            answer = json.loads(server.ask("POST", "/reload")[1])
            assert answer["update"] in ("incremental", "full", "whole"), answer
            check(number)
        assert server.metric("updates_total") == 2 * (len(steps) - 1)
        dead = workers_of(server)[1]
        os.kill(dead, signal.SIGKILL)
        until(lambda: dead not in workers_of(server) and b"2 of 2" in server.ask("GET", "/readyz")[1])
        check(len(steps) - 1)


def test_a_model_of_a_bucket_reaches_all_workers(run_folder, bucket, tmp_path):  # noqa: F811
    """The parent has spoken with the store before it forks."""
    folder, steps = tmp_path / "run", folders_in(run_folder / "checkpoints")
    shutil.copytree(run_folder, folder, ignore=shutil.ignore_patterns("checkpoints", "model"))
    shutil.copytree(steps[0], folder / "checkpoints" / steps[0].name)
    copier = RunCopier(folder, bucket / "run", fresh=True)
    copier.copy()
    with serving(bucket / "run", *WORKERS) as server:
        for one in steps[1:3]:
            shutil.copytree(one, folder / "checkpoints" / one.name)
            copier.copy()
            assert json.loads(server.ask("POST", "/reload")[1])["update"] in ("incremental", "full", "whole")
            answers = answers_of_each(server)
            assert answers[0] == answers[1]
            assert answers[0]["model"].startswith(f"step-{int(one.name)}-")


def test_workers_that_die_at_once_end_the_server(run_folder):
    with serving(run_folder, *WORKERS) as server:
        killed = set()

        def kill():
            """Until the server ends: the first two may have started more than 5 s ago, and do not count then."""
            try:
                new = [pid for pid in workers_of(server) if pid not in killed]
            except (FileNotFoundError, ProcessLookupError):
                return True
            for pid in new:
                killed.add(pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return False

        until(kill)
        ended = server.program.ended(LONGEST)
    assert ended.returncode == 1
    assert "died 5 times in a row within 5 s of their start; the last one was killed by SIGKILL" in ended.stdout


def test_workers_end_with_their_parent(run_folder):
    with serving(run_folder, *WORKERS) as server:
        pids = workers_of(server)
        server.program.kill()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_a_token_and_one_limit_for_all_workers(run_folder):
    body = orjson.dumps(GOOD)
    known = {"authorization": "Bearer word"}
    with serving(run_folder, *WORKERS, "--max-in-flight", "1", env={"HOTBED_TOKEN": "word"}) as server:
        pids = workers_of(server)
        for pid in pids:
            with only(pid, pids):
                assert server.ask("POST", "/score", body)[0] == 401
                assert server.ask("POST", "/score", body, known)[0] == 200
        with only(pids[0], pids):
            slow = socket.create_connection(("127.0.0.1", server.port), timeout=LONGEST)
            slow.sendall(b"POST /score HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer word\r\nContent-Length: 9\r\n\r\n{")
            until(lambda: b"in_flight 1.0" in server.ask("GET", "/metrics", None, known)[1])
        with slow, only(pids[1], pids):
            assert server.ask("POST", "/score", body, known)[0] == 503


def test_memory_is_divided(run_folder):
    ended = Program(SERVE, run_folder, "--port", "0", "--workers", "2", "--memory", "1000B").ended()
    assert ended.returncode == 3
    assert "memory=1000 bytes, divided among 2 processes, is too little" in ended.stdout


def test_a_part_that_was_left_half_written_is_read_and_written_again():
    board = Board(2)
    writing = Writing(board.parts[0])
    with writing:
        board.parts[0].candidates = 7
    board.parts[0].sequence += 1  # killed while it wrote
    assert board.copies()[0].candidates == 7
    with Writing(board.parts[0]):
        board.parts[0].candidates += 1
    assert board.copies()[0].sequence % 2 == 0
    assert [part.candidates for part in board.copies()] == [8, 0]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_workers_update_one_after_the_other():
    """The turn of one that is killed is over."""
    board, (said, say) = Board(2), os.pipe()
    pid = os.fork()
    if not pid:
        with board.turn(time.sleep):
            os.write(say, b".")
            time.sleep(LONGEST)
        os._exit(0)
    os.read(said, 1)
    waits = []

    def wait(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    with board.turn(wait):
        assert len(waits) == 3
    with board.turn(wait):  # it was free again
        assert len(waits) == 3
    for end in (said, say):
        os.close(end)
