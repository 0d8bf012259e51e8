"""The shared pieces against their definitions."""

import pytest
import torch

from hotbed.models.layers import MLP, BatchNorm, CrossNetwork, LinearTerm, fm_interaction, join, split_first_order


@pytest.mark.parametrize(("B", "F", "D"), [(1, 1, 1), (3, 2, 5), (4, 7, 16), (0, 3, 2)])
def test_fm_is_the_sum_over_pairs(B, F, D):
    vectors = torch.randn(B, F, D, dtype=torch.float64, requires_grad=True)
    pairs = torch.zeros(B, dtype=torch.float64)
    for i in range(F):
        for j in range(i):
            pairs = pairs + (vectors[:, i] * vectors[:, j]).sum(dim=1)
    torch.testing.assert_close(fm_interaction(vectors), pairs)
    if F > 1:
        expected = torch.autograd.grad(pairs.sum(), vectors)[0]
        torch.testing.assert_close(torch.autograd.grad(fm_interaction(vectors).sum(), vectors)[0], expected)


@pytest.mark.parametrize("rank", [0, 2])
def test_cross_network_is_its_recurrence(rank):
    network = CrossNetwork(5, 3, rank)
    x0 = torch.randn(4, 5)
    x = x0
    for layer in network.layers:
        if rank:
            down, up = layer
            weight, bias = up.weight @ down.weight, up.bias
        else:
            weight, bias = layer.weight, layer.bias
        x = x0 * (x @ weight.T + bias) + x
    torch.testing.assert_close(network(x0), x)


def test_linear_term():
    term = LinearTerm(2)
    term.bias.data.fill_(0.5)
    term.weight.data.copy_(torch.tensor([2.0, -1.0]))
    logits = term(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[10.0, 4.0]]))
    torch.testing.assert_close(logits, torch.tensor([0.5 + 6 + 20 - 4]))
    assert list(LinearTerm(0).state_dict()) == ["bias"]


def test_split_and_join_keep_order():
    vectors = torch.arange(12.0).view(2, 2, 3)
    embeddings, weights = split_first_order(vectors)
    assert weights.tolist() == [[2, 5], [8, 11]]
    dense = torch.tensor([[-1.0], [-2.0]])
    assert join(embeddings, dense).tolist() == [[0, 1, 3, 4, -1], [6, 7, 9, 10, -2]]
    assert join(embeddings, dense[:, :0]).tolist() == [[0, 1, 3, 4], [6, 7, 9, 10]]


def test_mlp_order_of_layers():
    mlp = MLP(3, (4, 5), 1, dropout=0.1, batch_norm=True)
    assert [type(layer).__name__ for layer in mlp] == [
        *["Linear", "BatchNorm", "ReLU", "Dropout"] * 2,
        "Linear",
    ]
    assert mlp.num_out == 1
    assert MLP(3, (4, 5)).num_out == 5
    assert MLP(3, ()).num_out == 3


def test_mlp_with_no_inputs_is_its_biases():
    mlp = MLP(0, (4,), 1)
    assert mlp(torch.zeros(3, 0)).shape == (3, 1)


def test_batch_norm_of_one_sample_uses_and_keeps_running_statistics():
    norm = BatchNorm(2)
    many = torch.randn(50, 2) * 3 + 1
    norm(many)
    before = norm.running_mean.clone()
    one = torch.tensor([[4.0, -2.0]])
    trained = norm(one)
    assert torch.equal(norm.running_mean, before)
    torch.testing.assert_close(trained, norm.eval()(one))
    torch.testing.assert_close(norm.train()(many), torch.nn.BatchNorm1d(2)(many))
