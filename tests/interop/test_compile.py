"""The dense model compiled, or recorded as a CUDA graph, beside tables behind a cache: the same training."""

import copy
import shutil

import pytest
import torch
from torch import nn

import hotbed
from hotbed.models import build_model

SIZE, FEATURES, STEPS = 32, 3, 6
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


def tables_of(device, cache=0.6):
    tables = {f"f{n}": hotbed.Table(60, 5) for n in range(FEATURES)}
    return hotbed.EmbeddingTables(tables, hotbed.optim.Adagrad(lr=0.1), device=device, cache=cache)


def model_of(device):
    torch.manual_seed(0)
    options = {"hidden": [16]}
    return build_model("dnn", num_features=FEATURES, dim=5, num_dense=2, options=options).to(device)


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        ids = torch.randint(0, 60, (SIZE, FEATURES), generator=generator)
        labels = (torch.rand(SIZE, generator=generator) < 0.3).float()
        yield hotbed.Batch(labels, torch.randn(SIZE, 2, generator=generator), ids)


def trained(device, wrap):
    """Losses, and the rows and dense weights they lead to; `wrap` makes the model faster."""
    tables, model = tables_of(device), model_of(device)
    run = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in hotbed.prefetch(batches(), tables, window=2):
        loss = nn.functional.binary_cross_entropy_with_logits(run(tables(batch.ids), batch.dense), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    rows = {name: tables.weight(name).clone() for name in tables.tables}
    assert tables.counters().evictions > 0
    return torch.stack(losses).cpu(), rows, copy.deepcopy(model.state_dict())


def assert_close(ours, theirs):
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-4, atol=1e-6)
    for mine, their in zip(ours[1:], theirs[1:], strict=True):
        for name, value in their.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-3, atol=1e-5)


@needs_compiler
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, of its compiler
def test_a_compiled_model_trains_as_the_plain_one():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # of tests before
    ours = trained("cpu", lambda model: torch.compile(model, fullgraph=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert_close(ours, trained("cpu", lambda model: model))
    torch._dynamo.reset()


def graphed(model):
    """Forward and backward as CUDA graphs, recorded before anything else runs on the device."""
    vectors = torch.zeros(SIZE, FEATURES, 5, device="cuda", requires_grad=True)
    dense = torch.zeros(SIZE, 2, device="cuda")
    return torch.cuda.make_graphed_callables(model, (vectors, dense))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node")  # torch's graphs are recorded on a stream of their own
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # in a backward that begins with a product
def test_a_model_in_cuda_graphs_trains_as_the_plain_one():
    assert_close(trained("cuda", graphed), trained("cuda", lambda model: model))


@pytest.mark.gpu
@needs_compiler
@pytest.mark.filterwarnings("ignore")
def test_a_model_compiled_into_cuda_graphs_trains_as_the_plain_one():
    torch._dynamo.reset()
    ours = trained("cuda", lambda model: torch.compile(model, mode="reduce-overhead"))
    assert_close(ours, trained("cuda", lambda model: model))
    torch._dynamo.reset()
