"""The server as clients see it: scores, refusals of every kind, its other paths, updates, and how it ends."""

import json
import re
import shutil
import signal
import socket
import threading

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hotbed
from hotbed.checkpoint.chain import folders_in
from tests.serve.conftest import GOOD, serving


def columns_of(tree):
    size = len(next(iter(tree["candidates"].values())))
    return tree["candidates"] | {name: [one] * size for name, one in tree["context"].items()}


def test_scores_are_those_of_the_scorer(server, run_folder):
    with hotbed.load(run_folder) as scorer:
        expected = scorer.score(columns_of(GOOD))
        status, answer = server.score(GOOD)
        assert status == 200
        np.testing.assert_allclose(answer["scores"], expected, rtol=0, atol=1e-6)
        assert answer["model"] == scorer.version
        rows = [{**GOOD["context"], "age": age, "ad": ad} for age, ad in zip(*GOOD["candidates"].values(), strict=True)]
        assert server.score({"rows": rows})[1]["scores"] == answer["scores"]
        odd = {
            "context": {"user": None, "tags": None},
            "candidates": {"price": ["1.5", "2"], "age": [None, 4], "ad": ["7", None]},
        }
        status, answer = server.score(odd)
        assert status == 200
        np.testing.assert_allclose(answer["scores"], scorer.score(columns_of(odd)), rtol=0, atol=1e-6)


def changed(**parts):
    return {**GOOD, **parts}


def candidates(**columns):
    return changed(candidates={**GOOD["candidates"], **columns})


def rows(**columns):
    """Two rows of the same values, beside a context."""
    return {"context": {**GOOD["context"]}, "rows": [columns] * 2}


def many_tags(count):
    """A bag of the context that 50 candidates share."""
    return {
        "context": {**GOOD["context"], "tags": ["a"] * count},
        "candidates": {"age": [1] * 50, "ad": [1] * 50},
    }


@pytest.mark.parametrize(
    ("tree", "status", "error", "where"),
    [
        ([], 422, "must be an object", None),
        (7, 422, "not a number", None),
        ({}, 422, "either candidates", None),
        (changed(rows=[]), 422, "either candidates", None),
        ({"rows": []}, 422, "no rows", "rows"),
        ({"rows": {}}, 422, "must be a list", "rows"),
        ({"rows": [7]}, 422, "must be an object", "rows[0]"),
        ({"rows": [{"ad": 1}, {"user": "u"}]}, 422, "same features", "rows[1]"),
        (changed(more=1), 422, "no part 'more'", "more"),
        (changed(context=[1]), 422, "not a list", "context"),
        (changed(context=[]), 422, "not a list", "context"),
        (changed(context=""), 422, "not a string", "context"),
        (changed(candidates=None), 422, "not null", "candidates"),
        (changed(candidates={}), 422, "no candidates", "candidates"),
        (candidates(ad=7), 422, "list of values", "candidates.ad"),
        (candidates(ad=[1]), 422, "1 values", "candidates.ad"),
        (changed(candidates={"age": [], "ad": []}), 422, "no candidates", "candidates.age"),
        (candidates(aad=[1, 2, 3]), 422, "did you mean 'ad'", "candidates.aad"),
        (candidates(user=["a", "b", "c"]), 422, "in context and in candidates", "context.user"),
        (changed(context={}), 422, "'price', 'user', 'tags' are missing", "candidates"),
        (changed(context={"price": 1, "user": "u"}), 422, "'tags' is missing", "candidates"),
        ({"context": {"age": 1}, "rows": [{"ad": 1}]}, 422, "'price', 'user', 'tags' are missing", "rows"),
        ({"rows": [{}]}, 422, "no candidates in rows", "rows"),
        (rows(age=1, aad=2), 422, "did you mean 'ad'", "rows.aad"),
        (rows(age=1, ad=2, price=3), 422, "in context and in rows", "context.price"),
        ({"rows": [{**GOOD["context"], "age": 1, "ad": one} for one in (1, 2.5)]}, 422, "whole number", "rows[1].ad"),
        ({"rows": [{**GOOD["context"], "age": 1, "ad": one} for one in (1, [2])]}, 422, "ad", "rows.ad"),
        ({"rows": [{**GOOD["context"], "age": 1, "ad": 2}] * 51}, 413, "51 rows", "rows"),
        (candidates(ad=[1, 2.5, 3]), 422, "not a whole number", "candidates.ad[1]"),
        (candidates(ad=[1, 2**70, 3]), 422, "not a whole number", "candidates.ad[1]"),
        (candidates(ad=[1, {"a": 1}, 3]), 422, "ad", "candidates.ad"),
        (candidates(ad=[1, True, 3]), 422, "values of different types", "candidates.ad"),
        (candidates(ad=[{"a": 1}] * 3), 422, "must hold numbers, strings or lists", "candidates.ad"),
        (candidates(ad=[[1], [2], [3]]), 422, "holds lists", "candidates.ad"),
        (candidates(age=[1, "x", 2]), 422, "age", "candidates.age"),
        (candidates(age=["1", "x", "2"]), 422, "not a number", "candidates.age[1]"),
        (candidates(age=[1, 1e300, 2]), 422, "infinite or beyond", "candidates.age[1]"),
        (changed(context={**GOOD["context"], "price": [1]}), 422, "holds lists", "context.price"),
        (changed(context={**GOOD["context"], "tags": "a"}), 422, "tags", "context.tags"),
        (changed(candidates={"age": [1] * 51, "ad": [1] * 51}), 413, "51 candidates", "candidates.age"),
        (many_tags(201), 413, "201 ids for each of 50 candidates are too many", "context.tags"),
    ],
)
def test_wrong_requests_are_told_what_and_where(server, tree, status, error, where):
    found, answer = server.score(tree)
    assert (found, answer.get("where")) == (status, where), answer
    assert error in answer["error"]
    assert server.score(GOOD)[0] == 200


def test_a_bag_of_the_context_is_looked_up_for_every_candidate(server):
    assert server.score(many_tags(200))[0] == 200  # half of the bytes of --max-body, divided by 50


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"\xff\xfe\x00", 400),
        (b"[" * 2000, 400),
        (b'{"rows": NaN}', 400),
        (b" " * 20_001, 413),
    ],
)
def test_bodies_that_are_no_json_or_too_long(server, body, status):
    found, answer, _ = server.ask("POST", "/score", body)
    assert found == status
    assert "error" in json.loads(answer)


def test_a_body_without_a_length_is_read_as_far_as_the_limit(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(b"POST /score HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        connection.sendall(b"5dc0\r\n" + b" " * 24_000 + b"\r\n0\r\n\r\n")
        assert b" 413 " in connection.recv(4096)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(b"what is this\r\n\r\n")
        assert b" 400 " in connection.recv(4096)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([0, "u7", 1e31, -(2**63)]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
features = st.sampled_from(["price", "age", "user", "tags", "ad", "other"])
trees = st.fixed_dictionaries(
    {},
    optional={
        "context": st.dictionaries(features, values, max_size=5) | values,
        "candidates": st.dictionaries(features, st.lists(values, min_size=2, max_size=2) | values, max_size=5) | values,
        "rows": st.lists(st.dictionaries(features, values, max_size=5) | values, max_size=3) | values,
    },
)
whole = st.fixed_dictionaries(
    {
        "context": st.fixed_dictionaries({"price": values, "tags": values}),
        "candidates": st.fixed_dictionaries(
            {name: st.lists(values, min_size=2, max_size=2) for name in ("age", "user", "ad")}
        ),
    }
)


@settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(junk=st.one_of(trees, whole, values, st.binary(max_size=60)))
def test_junk_is_refused_or_scored_and_never_breaks_anything(server, junk):
    body = junk if isinstance(junk, bytes) else json.dumps(junk).encode()
    status, answer, _ = server.ask("POST", "/score", body)
    assert status == 200 or 400 <= status < 500, answer
    assert "scores" in json.loads(answer) if status == 200 else "error" in json.loads(answer)


def test_the_other_paths(server):
    assert server.ask("GET", "/healthz")[:2] == (200, b"alive\n")
    status, text = server.ask("GET", "/readyz")[:2]
    assert status == 200
    assert re.fullmatch(rb"ready: \S+, written \d+ s ago\n", text)
    assert server.ask("GET", "/nothing")[0] == 404
    status, body, headers = server.ask("GET", "/score")
    assert (status, headers["allow"]) == (405, "POST")
    assert "error" in json.loads(body)
    page = server.ask("GET", "/")
    assert page[0] == 200
    assert "content-security-policy" in page[2]
    for word in (b"POST /score", b"candidates", b"openapi.json", b"tags"):
        assert word in page[1]
    assert b"http://" not in page[1]
    assert b"https://" not in page[1]
    document = json.loads(server.ask("GET", "/openapi.json")[1])
    ours = {path for path in document["paths"] if not path.startswith("/v2")}
    assert ours == {"/score", "/healthz", "/readyz", "/metrics", "/reload", "/openapi.json", "/"}
    example = document["paths"]["/score"]["post"]["requestBody"]["content"]["application/json"]["example"]
    assert server.score(example)[0] == 200
    before = server.metric('requests_total{status="200"}')
    server.score(GOOD)
    assert server.metric('requests_total{status="200"}') == before + 1
    assert server.metric("rows_bytes") <= 1_000_000
    assert server.metric("in_flight") == 0


def test_many_at_once_are_scored_together_and_alike(server):
    expected = server.score(GOOD)[1]["scores"]
    wrong = []

    def ask():
        for n in range(15):
            status, answer = server.score(GOOD if n % 3 else candidates(ad=[1]))
            if (status != 200 or not np.allclose(answer["scores"], expected, atol=1e-6)) and (n % 3 or status != 422):
                wrong.append(answer)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_too_many_at_once_and_too_slow(run_folder):
    with serving(run_folder, "--max-in-flight", "1", "--time-limit", "1") as server:
        for _ in range(
            30
        ):  # the other request must come within the second of the slow one, which a busy machine may miss
            with socket.create_connection(("127.0.0.1", server.port), timeout=30) as slow:
                slow.sendall(b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
                status, answer, headers = server.ask("POST", "/score", orjson.dumps(GOOD))
                ended = slow.recv(4096)
            if status == 503:
                break
        assert b" 408 " in ended
        assert json.loads(answer)["limit"] == 1
        assert headers["retry-after"] == "1"
        assert server.score(GOOD)[0] == 200


def test_newer_checkpoints_while_requests_come(run_folder, tmp_path):
    """Every answer names the checkpoint that gave it, none fails, and a damaged checkpoint changes nothing."""
    folder, steps = tmp_path / "run", folders_in(run_folder / "checkpoints")
    shutil.copytree(run_folder, folder, ignore=shutil.ignore_patterns("checkpoints"))
    shutil.rmtree(folder / "model")  # the meaning of columns comes from the dataset
    (folder / "checkpoints").mkdir()
    shutil.copytree(steps[0], folder / "checkpoints" / steps[0].name)
    expected = {}
    for one in steps:
        with hotbed.load(one) as scorer:
            expected[scorer.version] = scorer.score(columns_of(GOOD))
    seen, wrong, stop = set(), [], threading.Event()

    def ask():
        while not stop.is_set():
            status, answer = server.score(GOOD)
            good = status == 200 and np.allclose(answer["scores"], expected[answer["model"]], atol=1e-6, rtol=0)
            seen.add(answer.get("model"))
            if not good:
                wrong.append((status, answer))

    with serving(folder, "--memory", "1MB") as server:
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for one in steps[1:]:
                shutil.copytree(one, folder / "checkpoints" / one.name)
                answer = json.loads(server.ask("POST", "/reload")[1])
                assert answer["update"] in ("incremental", "full", "whole"), answer
                assert answer["model"] in expected
            broken = folder / "checkpoints" / f"{int(steps[-1].name) + 1:012}"
            shutil.copytree(steps[-1], broken)
            (broken / "dense.safetensors").write_bytes(b"nothing")
            answer = json.loads(server.ask("POST", "/reload")[1])
            assert (answer["update"], answer["model"]) == ("refused", list(expected)[-1])
            assert "damaged" in answer["error"]
            assert server.metric("stale") == 1
            assert server.metric("failed_updates_total") == 1
            assert server.score(GOOD)[0] == 200
            shutil.rmtree(broken)
            assert json.loads(server.ask("POST", "/reload")[1])["update"] == "none"
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert server.metric("updates_total") == len(steps) - 1
    assert wrong == []
    assert len(seen) > 1


def test_a_signal_lets_what_is_in_flight_finish(run_folder):
    with serving(run_folder) as server, socket.create_connection(("127.0.0.1", server.port), timeout=30) as slow:
        body = orjson.dumps(GOOD)
        slow.sendall(b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:10])
        while server.metric("in_flight") != 1:
            pass
        server.program.signal(signal.SIGTERM)
        slow.sendall(body[10:])
        assert b" 200 " in slow.recv(4096)
        ended = server.program.ended(30)
        assert ended.returncode == 0
        assert "stopping: requests in flight are finished first" in ended.stdout
        assert ended.stdout.rstrip().endswith("stopped")


def test_a_taken_port_and_a_missing_model_are_told(server, run_folder, tmp_path):
    for folder, port, told in ((run_folder, server.port, "cannot listen"), (tmp_path / "nothing", 0, "there is no")):
        with pytest.raises(AssertionError, match=told), serving(folder, "--port", str(port)):
            pass
