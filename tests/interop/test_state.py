"""Weights from and to other libraries: what they load scores as the tables do, and nothing that does not fit is taken."""

import pytest
import torch
from torch import nn

import hotbed
from hotbed.errors import ConfigError, HotbedError, ShapeError
from hotbed.interop import load_state_dict, state_dict

OPTIMIZERS = {
    "adagrad": hotbed.optim.Adagrad(lr=0.1),
    "rowwise_adagrad": hotbed.optim.RowwiseAdagrad(lr=0.1),
    "adam": hotbed.optim.Adam(lr=0.1),
    "sgd": hotbed.optim.SGD(lr=0.1),
}
ROWS = {"user": 12, "ad": 7}


def tables_of(optimizer="adagrad", seed=0, **settings):
    tables = {"user": hotbed.Table(12, 4), "ad": hotbed.Table(7, 8, "mean")}
    return hotbed.EmbeddingTables(tables, OPTIMIZERS[optimizer], seed=seed, **settings)


def bags_of(seed=0, size=6):
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, rows in ROWS.items():
        lengths = torch.randint(1, 4, (size,), generator=generator)
        values = torch.randint(0, rows, (int(lengths.sum()),), generator=generator)
        found[name] = hotbed.Jagged(values, nn.functional.pad(lengths.cumsum(0), (1, 0)))
    return found


def trained(optimizer="adagrad", **settings):
    tables = tables_of(optimizer, **settings)
    for seed in range(3):
        sum((one * one).sum() for one in tables(bags_of(seed)).values()).backward()
    return tables


def modules():
    bags = {"user": nn.EmbeddingBag(12, 4, mode="sum"), "ad": nn.EmbeddingBag(7, 8, mode="mean")}
    return nn.ModuleDict(bags)


@pytest.mark.parametrize("settings", [{}, {"cache": 0.8}, {"precision": "bf16"}])
def test_embedding_bags_there_and_back(settings):
    tables, bags = trained(**settings), modules()
    bags.load_state_dict(state_dict(tables))
    inputs = bags_of(9)
    for name, out in tables.eval()(inputs).items():
        theirs = bags[name](inputs[name].values, inputs[name].offsets[:-1])
        torch.testing.assert_close(out.detach(), theirs.detach(), rtol=0, atol=1e-6)
    other = tables_of(seed=1, **settings)
    load_state_dict(other, bags.state_dict())
    assert all(torch.equal(other.weight(name), tables.weight(name)) for name in ROWS)
    assert not torch.equal(tables_of(seed=1).weight("user"), other.weight("user"))


def test_what_is_handed_out_is_a_copy():
    tables = trained()
    state = state_dict(tables, prefix="sparse.")
    assert list(state) == ["sparse.user.weight", "sparse.ad.weight"]
    assert state["sparse.user.weight"].untyped_storage().nbytes() == 12 * 4 * 4
    state["sparse.user.weight"].zero_()
    assert tables.weight("user").any()


def test_one_table_and_its_own_weight():
    tables = hotbed.EmbeddingTables({"user": hotbed.Table(12, 4)})
    bag = nn.EmbeddingBag(12, 4)
    load_state_dict(tables, bag.state_dict())
    assert torch.equal(tables.weight("user"), bag.weight.detach())


def test_names_of_torchrec():
    tables = hotbed.EmbeddingTables({"user": hotbed.Table(12, 4), "seen": hotbed.Table(7, 4, "none")})
    state = state_dict(tables, style="torchrec")
    assert list(state) == ["embedding_bags.user.weight", "embeddings.seen.weight"]
    other = hotbed.EmbeddingTables({"user": hotbed.Table(12, 4), "seen": hotbed.Table(7, 4, "none")}, seed=4)
    load_state_dict(other, state, style="torchrec")
    assert all(torch.equal(other.weight(name), tables.weight(name)) for name in tables.tables)


@pytest.mark.parametrize("place", ["host", "dev", "uvm"])
@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise_adagrad"])
def test_sums_of_adagrad_travel_with_the_rows(optimizer, place):
    tables, other = trained(optimizer), tables_of(optimizer, seed=1)
    state = state_dict(tables, style="fbgemm", place=place)
    per_row = optimizer == "rowwise_adagrad"
    assert state[f"weights_{place}"].shape == (12 * 4 + 7 * 8,)
    assert state[f"momentum1_{place}"].shape == (12 + 7 if per_row else 12 * 4 + 7 * 8,)
    load_state_dict(other, state, style="fbgemm")
    ours, theirs = tables.state_dict(), other.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if name != "num_updates")
    assert any("sum" in name for name in ours)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_other_states_do_not_travel(optimizer):
    state = state_dict(trained(optimizer), style="fbgemm")
    assert not any(name.startswith("momentum") for name in state)
    with_sums = state_dict(trained("adagrad"), style="fbgemm")
    other = tables_of(optimizer)
    with pytest.raises(ShapeError, match=r"momentum1 means nothing to .*; weights_only=True leaves it out"):
        load_state_dict(other, with_sums, style="fbgemm")
    load_state_dict(other, with_sums, style="fbgemm", weights_only=True)
    assert torch.equal(other.weight("ad"), trained("adagrad").weight("ad"))
    assert "momentum1_host" not in state_dict(trained("adagrad"), style="fbgemm", weights_only=True)


@pytest.mark.parametrize(
    "own", [{"frozen": True}, {"optimizer": hotbed.optim.SGD()}, {"optimizer": hotbed.optim.RowwiseAdagrad()}]
)
def test_sums_of_tables_with_optimizers_of_their_own(own):
    def make(**settings):
        declared = {"a": hotbed.Table(9, 4), "b": hotbed.Table(9, 4, **settings)}
        return hotbed.EmbeddingTables(declared, hotbed.optim.Adagrad())

    tables, alike = make(**own), make()
    with pytest.raises(ConfigError, match=r"keep different sums \(a: sum_of_squares; b: .*weights_only=True"):
        state_dict(tables, style="fbgemm")
    with pytest.raises(ShapeError, match=r"momentum1 means nothing to|sum of 'b' is"):
        load_state_dict(tables, state_dict(alike, style="fbgemm"), style="fbgemm")
    state = state_dict(tables, style="fbgemm", weights_only=True)
    load_state_dict(alike, state, style="fbgemm")
    assert torch.equal(alike.weight("b"), tables.weight("b"))


def test_a_list_is_split_embedding_weights():
    weights = [torch.rand(12, 4), torch.rand(7, 8)]
    tables = tables_of()
    load_state_dict(tables, weights, style="fbgemm")
    assert torch.equal(tables.weight("ad"), weights[1])
    with pytest.raises(ShapeError, match="weights of 1 tables, and there are 2: user, ad"):
        load_state_dict(tables, weights[:1], style="fbgemm")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("ad.weight"), r"absent: ad\.weight"),
        (lambda state: state.update({"site.weight": torch.zeros(1)}), r"not wanted: site\.weight"),
        (
            lambda state: state.update({"ad.weight": torch.zeros(7, 4)}),
            r"weight of 'ad' is \[7, 4\], and the table's \[7, 8\]",
        ),
        (lambda state: state.update({"ad.weight": torch.zeros(7, 8, dtype=torch.int64)}), "is torch.int64"),
        (lambda state: state.update({"ad.weight": [1.0]}), "is a list, spread over ranks"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_taken(change, message):
    tables = tables_of()
    state = {name: tensor + 1 for name, tensor in state_dict(tables).items()}
    change(state)
    before = tables.weight("user").clone()
    with pytest.raises(ShapeError, match=message):
        load_state_dict(tables, state)
    assert torch.equal(tables.weight("user"), before)


def test_fbgemm_states_that_do_not_fit():
    tables, state = tables_of(), state_dict(tables_of(), style="fbgemm")
    for change, message in (
        ({"rows_per_table": torch.tensor([12])}, "has 1 tables read by 2 features, and hotbed's tables are 2"),
        ({"rows_per_table": torch.tensor([13, 7])}, r"\[13, 4\], and the table's \[12, 4\]"),
        ({"weights_host": state["weights_host"][:-1]}, "weights_host has 103 numbers; table 1 is at 48 to 104"),
    ):
        with pytest.raises(ShapeError, match=message):
            load_state_dict(tables, {**state, **change}, style="fbgemm")
    with pytest.raises(ShapeError, match="not a state_dict of FBGEMM"):
        load_state_dict(tables, state_dict(tables), style="fbgemm")
    with pytest.raises(ShapeError, match="host, dev or uvm"):
        state_dict(tables, style="fbgemm", place="hbm")


def test_arguments_that_make_no_sense():
    with pytest.raises(ConfigError, match="style must be one of"):
        state_dict(tables_of(), style="hugectr")
    with pytest.raises(ConfigError, match=r"takes hotbed\.EmbeddingTables or hotbed\.EmbeddingBag, not ModuleDict"):
        state_dict(modules())
    with pytest.raises(ShapeError, match="a mapping of names, not list"):
        load_state_dict(tables_of(), [torch.zeros(1)])
    dynamic = hotbed.EmbeddingTables({"user": hotbed.Table(None, 4)}, hbm="1MiB")
    with pytest.raises(HotbedError, match="has dynamic ids"):
        state_dict(dynamic)
    with pytest.raises(HotbedError, match="has dynamic ids"):
        load_state_dict(dynamic, {"user.weight": torch.zeros(2, 4)})
