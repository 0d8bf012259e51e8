import numpy as np
import pytest
import torch

import hotbed
from hotbed.errors import ConfigError
from hotbed.ops.init_rows import init_rows, parse_init, reference, stream_of

INITS = [hotbed.Uniform(0.05), hotbed.Normal(0.01), hotbed.Constant(0.5)]


@pytest.mark.parametrize("init", INITS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (63, 5), (1000, 17)])
def test_compiled_equals_reference_bit_for_bit(init, dtype, shape):
    ids = torch.randint(-(2**63), 2**63 - 1, (shape[0],))
    expected = torch.full(shape, float("nan"), dtype=dtype)
    actual = expected.clone()
    reference.init_rows(expected, ids, stream_of(3, "ad"), init)
    init_rows(actual, ids, stream_of(3, "ad"), init)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("init", INITS, ids=str)
def test_a_row_depends_on_its_id_alone(init):
    ids = torch.arange(500)
    whole, part = torch.empty(500, 7), torch.empty(3, 7)
    init_rows(whole, ids, 42, init)
    init_rows(part, torch.tensor([499, 0, 17]), 42, init)
    assert torch.equal(part, whole[[499, 0, 17]])


def test_seed_table_and_id_all_matter():
    values = []
    for seed, table, row in [(0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1)]:
        out = torch.empty(1, 8)
        init_rows(out, torch.tensor([row]), stream_of(seed, table), hotbed.Normal(1.0))
        values.append(tuple(out[0].tolist()))
    assert len(set(values)) == 4


def test_moments():
    out = torch.empty(100_000, 8, dtype=torch.float64)
    init_rows(out, torch.arange(100_000), 1, hotbed.Normal(2.0))
    values = out.numpy()
    assert abs(values.mean()) < 0.02
    assert abs(values.std() - 2.0) < 0.02
    assert abs((values**4).mean() / values.std() ** 4 - 3) < 0.2  # a normal has 3; eight uniform terms give 2.85
    assert np.abs(np.corrcoef(values.T) - np.eye(8)).max() < 0.02
    init_rows(out, torch.arange(100_000), 1, hotbed.Uniform(0.5))
    assert out.abs().max() < 0.5
    assert abs(float(out.std()) - 0.5 / 3**0.5) < 0.002


def test_initial_values_never_change():
    """These bits are part of the format: a change would re-seed every table in the world."""
    golden = ["-0x1.f8d2be0000000p-1", "0x1.24b8f80000000p-3", "-0x1.6f5db40000000p-2"]
    out = torch.empty(1, 3)
    init_rows(out, torch.tensor([7]), stream_of(0, "user"), hotbed.Uniform(1.0))
    assert [value.hex() for value in out[0].tolist()] == golden


@pytest.mark.parametrize("text", ["normal", "normal()", "cauchy(1)", "uniform(x)", "uniform(1)(2)", "normal(1e)"])
def test_bad_init_text(text):
    with pytest.raises(ConfigError, match="uniform"):
        parse_init(text)


def test_init_text():
    assert parse_init(" normal( 1e-4 ) ") == hotbed.Normal(1e-4)
    assert parse_init("uniform(0.5)") == hotbed.Uniform(0.5)
    assert parse_init("constant(-1)") == hotbed.Constant(-1.0)
