"""The terms of a factorization machine and their own backward pass, against autograd."""

import pytest
import torch

from hotbed.models.deep import DLRM, _dots, pair_dots
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


@pytest.mark.parametrize(("B", "F", "D"), [(1, 2, 1), (3, 4, 5), (5, 27, 16), (0, 3, 2)])
def test_dots_of_pairs(B, F, D):
    model = DLRM(F, D, 0)
    vectors = torch.randn(B, F, D, dtype=torch.float64, requires_grad=True)
    ours, plain = pair_dots(vectors, model.pairs, model.places), _dots(vectors, model.pairs)
    assert torch.equal(ours, plain)
    weights = torch.randn_like(plain)
    found, expected = (torch.autograd.grad(one, vectors, weights)[0] for one in (ours, plain))
    torch.testing.assert_close(found, expected)


def test_dots_of_pairs_can_be_differentiated_twice():
    model = DLRM(3, 2, 0)
    vectors = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda v: pair_dots(v, model.pairs, model.places), vectors)


@pytest.mark.parametrize("inside", [False, True])
def test_dots_of_pairs_under_autocast(inside):
    """Products and gradients in the lower type, rows in theirs; backward inside autocast or after it, as torch advises."""
    model = DLRM(5, 8, 0)
    vectors = torch.randn(6, 5, 8, requires_grad=True)
    weights = torch.randn(6, 10)
    grads = []
    for dots in (lambda v: pair_dots(v, model.pairs, model.places), lambda v: _dots(v, model.pairs)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = dots(vectors)
            assert found.dtype == torch.bfloat16
            if inside:
                grads += torch.autograd.grad((found * weights).sum(), vectors)
        if not inside:
            grads += torch.autograd.grad((found * weights).sum(), vectors)
    assert grads[0].dtype == torch.float32
    torch.testing.assert_close(*grads, rtol=0.03, atol=0.05)


def test_dots_of_pairs_in_torch_func():
    model = DLRM(5, 8, 0)
    vectors, weights = torch.randn(6, 5, 8), torch.randn(6, 10)

    def dots(vectors):
        return pair_dots(vectors, model.pairs, model.places)

    expected = torch.func.grad(lambda v: (_dots(v, model.pairs) * weights).sum())(vectors)
    torch.testing.assert_close(torch.func.grad(lambda v: (dots(v) * weights).sum())(vectors), expected)
    each = torch.func.vmap(torch.func.grad(lambda v, w: (dots(v[None])[0] * w).sum()))(vectors, weights)
    torch.testing.assert_close(each, expected)
