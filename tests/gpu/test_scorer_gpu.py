"""`hotbed.load(..., device="cuda")`: the dense model runs on the device, rows come from files as on a CPU, scores agree."""

import numpy as np
import pytest
import torch

import hotbed
from tests.scorer.conftest import dataset, from_raw, raw_table, trained  # noqa: F401  fixtures
from tests.scorer.test_scorer import batches

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["plain", "bf16", "dynamic"])
def test_scores_on_cuda_are_those_on_the_cpu(trained, dataset, kind):  # noqa: F811
    folder = trained(kind)
    with hotbed.load(folder, memory="64KB") as cpu, hotbed.load(folder, memory="64KB", device="cuda") as cuda:
        for batch in batches(dataset):
            found = cuda.logits(batch).logits
            assert found.device == torch.device("cpu")
            np.testing.assert_allclose(cuda.score_batch(batch), cpu.score_batch(batch), rtol=0, atol=1e-5)


def test_raw_values_on_cuda(from_raw):  # noqa: F811
    rows = raw_table(50).drop_columns("click").to_pylist()
    with hotbed.load(from_raw) as cpu, hotbed.load(from_raw, device="cuda:0") as cuda:
        np.testing.assert_allclose(cuda.score(rows), cpu.score(rows), rtol=0, atol=1e-5)
        np.testing.assert_array_equal(cuda.score(rows), cuda.score(rows))
