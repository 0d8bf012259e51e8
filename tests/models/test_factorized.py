"""The terms of a factorization machine and their own backward pass, against autograd."""

import pytest
import torch

from hotbed.models.fm import _plain, factorization_terms


@pytest.mark.parametrize(("B", "F", "D"), [(1, 1, 1), (3, 2, 5), (4, 7, 16), (0, 3, 2)])
def test_gradients_are_those_of_autograd(B, F, D):
    vectors = torch.randn(B, F, D + 1, dtype=torch.float64, requires_grad=True)
    of_embeddings, of_orders = torch.randn(B, F, D, dtype=torch.float64), torch.randn(B, dtype=torch.float64)
    results = [part(vectors) for part in (factorization_terms, _plain)]
    for ours, plain in zip(*results):
        assert torch.equal(ours, plain)
    found, expected = (torch.autograd.grad(two, vectors, (of_embeddings, of_orders))[0] for two in results)
    torch.testing.assert_close(found, expected)


def test_either_output_may_be_left_alone():
    vectors = torch.randn(4, 3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: factorization_terms(v)[0], vectors)
    assert torch.autograd.gradcheck(lambda v: factorization_terms(v)[1], vectors)
    assert torch.autograd.gradgradcheck(lambda v: factorization_terms(v)[1], vectors)


def test_plain_without_gradients():
    vectors = torch.randn(4, 3, 6)
    embeddings, orders = factorization_terms(vectors)
    assert not orders.requires_grad
    assert torch.equal(embeddings, vectors[:, :, :5])
