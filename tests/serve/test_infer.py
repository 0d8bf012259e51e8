"""The Open Inference Protocol: the same scores as POST /score, to the bit, and refusals that say where."""

import copy
import json

import pytest

import hotbed
from hotbed.serve.infer import InferRequest
from hotbed.serve.request import RequestError
from tests.serve.conftest import GOOD, serving

MODEL = "/v2/models/run"


def tensor(name, datatype, data, shape=None):
    return {"name": name, "datatype": datatype, "shape": shape or [len(data)], "data": data}


PRICE, USER = tensor("price", "FP32", [1.5]), tensor("user", "BYTES", ["u7"])
TAGS = tensor("tags", "BYTES", [["a", "b"]], [1, 2])
AGE, AD = tensor("age", "INT64", [1, 2, 3]), tensor("ad", "INT64", [0, 1_000_003, 7])
MANY = [tensor("age", "INT64", [1] * 50), tensor("ad", "INT64", [7] * 50)]
SHARED = [PRICE, USER, TAGS, AGE, AD]  # GOOD: three of its tensors are of all candidates


def infer(server, tree, path=f"{MODEL}/infer"):
    status, body, _ = server.ask("POST", path, json.dumps(tree).encode())
    return status, json.loads(body)


def scores(server, inputs):
    status, answer = infer(server, {"inputs": inputs})
    assert status == 200, answer
    return answer["outputs"][0]["data"]


def with_tensor(name, **changes):
    return [{**one, **changes} if one["name"] == name else one for one in SHARED]


def test_scores_are_those_of_score_to_the_bit(server):
    expected = server.score(GOOD)[1]
    status, answer = infer(server, {"id": "a7", "inputs": SHARED, "outputs": [{"name": "scores"}], "parameters": {}})
    assert status == 200
    assert answer == {
        "model_name": "run", "model_version": expected["model"], "id": "a7",
        "outputs": [{"name": "scores", "datatype": "FP64", "shape": [3], "data": expected["scores"]}],
    }  # fmt: skip
    assert "id" not in infer(server, {"inputs": SHARED})[1]


def test_tensors_of_all_candidates_and_of_none(server):
    """Columns as lists of one value for each, and a single candidate."""
    each = {
        **GOOD["candidates"],
        "price": [1.5, None, -2],
        "user": ["u7", None, "nobody"],
        "tags": [["a", "b"], [], ["c"]],
    }
    inputs = [
        tensor("price", "FP64", each["price"]), tensor("user", "BYTES", each["user"]), AGE, AD,
        tensor("tags", "BYTES", ["a", "b", None, None, None, "c"], [3, 2]),
    ]  # fmt: skip
    assert scores(server, inputs) == server.score({"candidates": each})[1]["scores"]
    one = {name: values[:1] for name, values in each.items()}
    single = [tensor(name, "BYTES", values) for name, values in one.items() if name in ("user",)]
    single += [
        tensor("tags", "BYTES", [["a", "b"]], [1, 2]),
        tensor("price", "FP32", [1.5]),
        tensor("age", "INT8", [1]),
    ]
    single += [tensor("ad", "UINT64", [0])]
    assert scores(server, single) == server.score({"candidates": one})[1]["scores"]


@pytest.mark.parametrize(
    "inputs",
    [
        with_tensor("ad", shape=[3, 1]), with_tensor("ad", shape=[3, 1], data=[[0], [1_000_003], [7]]),
        with_tensor("tags", data=["a", "b"]), with_tensor("tags", shape=[1, 3], data=["a", None, "b"]),
        with_tensor("price", shape=[3], data=[1.5] * 3), with_tensor("age", datatype="FP64", data=[1.0, 2.0, 3.0]),
        SHARED[::-1],
    ],
    ids=["column", "nested", "flat bag", "filled up", "repeated", "other type", "other order"],
)  # fmt: skip
def test_forms_of_the_same_tensors(server, inputs):
    assert scores(server, inputs) == server.score(GOOD)[1]["scores"]


def test_no_bag_at_all(server):
    expected = server.score({**GOOD, "context": {**GOOD["context"], "tags": []}})[1]["scores"]
    assert scores(server, with_tensor("tags", shape=[1, 0], data=[])) == expected
    assert scores(server, with_tensor("tags", shape=[1, 2], data=[None, None])) == expected


@pytest.mark.parametrize(
    ("tree", "status", "error", "where"),
    [
        ([], 422, "object with inputs", None),
        ({}, 422, "inputs must be a list of tensors, not null", "inputs"),
        ({"inputs": []}, 422, "list of tensors", "inputs"),
        ({"inputs": {}}, 422, "not an object", "inputs"),
        ({"inputs": SHARED, "rows": []}, 422, "no part 'rows'", "rows"),
        ({"inputs": SHARED, "id": 7}, 422, "id must be a string", "id"),
        ({"inputs": SHARED, "parameters": []}, 422, "must be an object", "parameters"),
        ({"inputs": SHARED, "parameters": {"binary_data_output": True}}, 422, "binary tensors", "parameters"),
        ({"inputs": SHARED, "outputs": 7}, 422, "must be a list", "outputs"),
        ({"inputs": SHARED, "outputs": [{"name": "logits"}]}, 422, "'scores'", "outputs[0]"),
        ({"inputs": SHARED, "outputs": [{"name": "scores", "parameters": {"binary_data": True}}]}, 422, "binary",
         "outputs[0].parameters"),
        ({"inputs": [7]}, 422, "object with a name", "inputs[0]"),
        ({"inputs": [{"name": 7}]}, 422, "object with a name", "inputs[0]"),
        ({"inputs": [*SHARED, AD]}, 422, "'ad' is there twice", "inputs[5]"),
        ({"inputs": SHARED[:-1]}, 422, "'ad' is missing", "inputs"),
        ({"inputs": [*SHARED, tensor("aad", "INT64", [1, 2, 3])]}, 422, "did you mean 'ad'", "inputs.aad"),
        ({"inputs": [*SHARED, tensor("useer", "BYTES", ["a"])]}, 422, "did you mean 'user'", "inputs.useer"),
        ({"inputs": with_tensor("ad", datatype="BOOL")}, 422, "datatype must be one of BYTES, INT8", "inputs.ad"),
        ({"inputs": with_tensor("ad", datatype=None)}, 422, "datatype must be", "inputs.ad"),
        ({"inputs": with_tensor("ad", shape=None)}, 422, "shape must be a list", "inputs.ad"),
        ({"inputs": with_tensor("ad", shape=[-1])}, 422, "whole numbers", "inputs.ad"),
        ({"inputs": with_tensor("ad", shape=[True])}, 422, "whole numbers", "inputs.ad"),
        ({"inputs": with_tensor("ad", shape=[])}, 422, "must be [B] or [B, 1]", "inputs.ad"),
        ({"inputs": with_tensor("ad", shape=[1, 3])}, 422, "must be [B] or [B, 1]", "inputs.ad"),
        ({"inputs": with_tensor("tags", shape=[2])}, 422, "must be [B, L]", "inputs.tags"),
        ({"inputs": with_tensor("tags", shape=[1, 3])}, 422, "must have the shape [1, 3]", "inputs.tags"),
        ({"inputs": with_tensor("ad", shape=[4])}, 422, "data has 3 values", "inputs.ad"),
        ({"inputs": with_tensor("ad", data=7)}, 422, "data must be a list, not a number", "inputs.ad"),
        ({"inputs": with_tensor("ad", data=None, parameters={"binary_data_size": 24})}, 422, "binary tensors", "inputs.ad"),
        ({"inputs": with_tensor("ad", data=[1, "2", 3])}, 422, "a string is not of datatype INT64", "inputs.ad[1]"),
        ({"inputs": with_tensor("ad", data=[1, True, 3])}, 422, "true or false is not", "inputs.ad[1]"),
        ({"inputs": with_tensor("user", data=[["u7"]], shape=[1])}, 422, "a list is not of datatype BYTES", "inputs.user[0]"),
        ({"inputs": with_tensor("ad", datatype="FP64", data=[1, 2.5, 3])}, 422, "not a whole number", "inputs.ad[1]"),
        ({"inputs": with_tensor("ad", data=[1, 2**70, 3])}, 422, "a number is not of datatype INT64", "inputs.ad[1]"),
        ({"inputs": with_tensor("price", datatype="FP64", data=[1e300])}, 422, "infinite or beyond", "inputs.price"),
        ({"inputs": with_tensor("age", shape=[2], data=[1, 2])}, 422, "'ad' has 3 values and 'age' has 2", "inputs.ad"),
        ({"inputs": with_tensor("ad", shape=[51], data=[1] * 51)}, 413, "51 candidates", "inputs.ad"),
        ({"inputs": with_tensor("tags", shape=[1, 2000], data=["a"] * 2000)[:3] + MANY}, 413, "2000 ids for each of 50",
         "inputs.tags"),
        ({"inputs": with_tensor("tags", shape=[10**9, 0], data=[])}, 413, "1000000000 candidates", "inputs.tags"),
        ({"inputs": [{**one, "shape": [0, 0] if one is TAGS else [0], "data": []} for one in SHARED]}, 422, "no candidates",
         "inputs.price"),
    ],
)  # fmt: skip
def test_wrong_requests_are_told_what_and_where(server, tree, status, error, where):
    found, answer = infer(server, tree)
    assert (found, answer.get("where")) == (status, where), answer
    assert error in answer["error"]
    assert scores(server, SHARED)


def test_what_the_server_and_the_model_say_of_themselves(server):
    def get(path):
        status, body, headers = server.ask("GET", path)
        assert headers["content-type"] == "application/json"
        return status, json.loads(body)

    version = server.score(GOOD)[1]["model"]
    assert get("/v2") == (200, {"name": "hotbed", "version": hotbed.__version__, "extensions": []})
    assert get("/v2/health/live") == (200, {"live": True})
    assert get("/v2/health/ready") == (200, {"ready": True})
    for path in (MODEL, f"{MODEL}/versions/{version}"):
        assert get(f"{path}/ready") == (200, {"name": "run", "ready": True})
        status, about = get(path)
        assert (status, about["name"], about["versions"], about["platform"]) == (200, "run", [version], "hotbed")
        assert {one["name"]: (one["datatype"], one["shape"]) for one in about["inputs"]} == {
            "price": ("FP64", [-1]), "age": ("FP64", [-1]), "user": ("BYTES", [-1]), "ad": ("INT64", [-1]),
            "tags": ("BYTES", [-1, -1]),
        }  # fmt: skip
        assert about["outputs"] == [{"name": "scores", "datatype": "FP64", "shape": [-1]}]
        assert infer(server, {"inputs": SHARED}, f"{path}/infer")[0] == 200


@pytest.mark.parametrize("path", ["/v2/models/other", f"{MODEL}/versions/7"])
def test_other_models_and_versions_are_not_here(server, path):
    for one in (path, f"{path}/ready"):
        status, body, _ = server.ask("GET", one)
        assert (status, list(json.loads(body))) == (404, ["error"])
    status, answer = infer(server, {"inputs": SHARED}, f"{path}/infer")
    assert status == 404
    assert "'run'" in answer["error"] or "the current one is" in answer["error"]
    assert infer(server, {"inputs": SHARED}, f"{MODEL}/infer")[0] == 200


def test_limits_and_counters_are_those_of_score(server):
    before = server.metric('requests_total{status="200"}'), server.metric("candidates_total")
    scores(server, SHARED)
    assert server.metric('requests_total{status="200"}') == before[0] + 1
    assert server.metric("candidates_total") == before[1] + 3
    assert server.ask("POST", f"{MODEL}/infer", b" " * 20_001)[0] == 413
    assert server.ask("POST", f"{MODEL}/infer", b"{")[0] == 400
    assert server.ask("GET", f"{MODEL}/infer")[0] == 405


def test_the_document_has_the_paths_and_an_example_that_scores(server):
    paths = json.loads(server.ask("GET", "/openapi.json")[1])["paths"]
    example = paths[f"{MODEL}/infer"]["post"]["requestBody"]["content"]["application/json"]["example"]
    assert len(scores(server, copy.deepcopy(example)["inputs"])) == 2
    for path, verbs in paths.items():
        if path.startswith("/v2") and "get" in verbs:
            known = path.replace("{version}", server.score(GOOD)[1]["model"])
            assert server.ask("GET", known)[0] == 200, path


def test_a_name_of_its_own(run_folder):
    with serving(run_folder, "--model-name", "clicks v1") as server:
        assert infer(server, {"inputs": SHARED}, "/v2/models/clicks%20v1/infer")[1]["model_name"] == "clicks v1"
        assert "/v2/models/clicks%20v1/infer" in json.loads(server.ask("GET", "/openapi.json")[1])["paths"]
    with pytest.raises(AssertionError, match="must not have a slash"), serving(run_folder, "--model-name", "a/b"):
        pass


def test_a_version_that_went_while_it_was_scored():
    with pytest.raises(RequestError, match="the current one is 'new'"):
        InferRequest("run", "old").write([0.5], "new")
