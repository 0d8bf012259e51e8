"""Every model: shapes, gradients, parameter counts, determinism."""

import itertools
import math

import pytest
import torch

from hotbed.errors import ConfigError, ShapeError
from hotbed.models import MODELS, build_model, model_card

VARIANTS = {
    "lr": ("lr", {}),
    "fm": ("fm", {}),
    "dnn": ("dnn", {"hidden": [9, 5]}),
    "dnn-norm": ("dnn", {"hidden": [9, 5], "batch_norm": True, "dropout": 0.3, "activation": "gelu"}),
    "dnn-bare": ("dnn", {"hidden": []}),
    "wide_deep": ("wide_deep", {"hidden": [9, 5]}),
    "deepfm": ("deepfm", {"hidden": [9, 5]}),
    "dlrm": ("dlrm", {"hidden": [9, 5], "bottom": [6]}),
    "dlrm-norm": ("dlrm", {"hidden": [9, 5], "bottom": [], "batch_norm": True}),
    "dlrm-cat": ("dlrm", {"hidden": [9, 5], "interaction": "cat"}),
    "dcnv2": ("dcnv2", {"hidden": [9, 5], "num_cross": 3}),
    "dcnv2-stacked": ("dcnv2", {"hidden": [9, 5], "structure": "stacked", "batch_norm": True}),
    "dcnv2-low-rank": ("dcnv2", {"hidden": [9, 5], "low_rank": 2}),
    "dcnv2-bare": ("dcnv2", {"hidden": [], "low_rank": 1, "num_cross": 1}),
    "autoint": ("autoint", {"hidden": [9, 5], "attention_dim": 8}),
    "autoint-deep": (
        "autoint",
        {"hidden": [9], "attention_dim": 6, "num_heads": 3, "num_layers": 3, "scale": True, "layer_norm": True},
    ),
    "finalmlp": ("finalmlp", {"hidden": [9, 6], "num_heads": 3}),
    "finalmlp-two": ("finalmlp", {"hidden": [9, 6], "second_hidden": [4], "second_dropout": 0.2, "num_heads": 2}),
    "finalmlp-gated": ("finalmlp", {"hidden": [8], "gating": True, "gate_hidden": [16], "context": [0]}),
}
ODD = [(1, 1, 1, 0), (3, 1, 5, 1), (3, 2, 1, 13), (1, 2, 16, 0), (3, 7, 5, 13), (5, 7, 16, 1)]  # B, F, D, N


def make(variant, num_features, dim, num_dense, seed=0):
    name, options = VARIANTS[variant]
    torch.manual_seed(seed)
    return build_model(name, num_features=num_features, dim=dim, num_dense=num_dense, options=options)


def make_input(model, batch, seed=1):
    generator = torch.Generator().manual_seed(seed)
    width = model.vector_width(model.dim)
    vectors = torch.randn(batch, model.num_features, width, generator=generator)
    return vectors, torch.randn(batch, model.num_dense, generator=generator)


def test_every_model_has_a_variant():
    assert {name for name, _ in VARIANTS.values()} == set(MODELS)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("B", "F", "D", "N"), [*ODD, (0, 3, 4, 2), (0, 1, 4, 0)])
def test_one_finite_logit_per_sample(variant, B, F, D, N):
    model = make(variant, F, D, N)
    vectors, dense = make_input(model, B)
    for mode in (True, False):
        logits = model.train(mode)(vectors, dense)
        assert logits.shape == (B,)
        assert logits.dtype == torch.float32
        assert torch.isfinite(logits).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_batch_of_zero_and_one_backward(variant):
    model = make(variant, 3, 4, 2)
    for batch in (0, 1):
        vectors, dense = make_input(model, batch)
        vectors.requires_grad_()
        model(vectors, dense).sum().backward()
        assert vectors.grad.shape == vectors.shape
        assert torch.isfinite(vectors.grad).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("N", [0, 3])
def test_gradient_reaches_every_input_and_parameter(variant, N):
    model = make(variant, 4, 5, N)
    vectors, dense = make_input(model, 64)
    vectors.requires_grad_()
    dense.requires_grad_()
    weights = torch.linspace(-1, 1, 64)
    (model(vectors, dense).sigmoid() * weights).sum().backward()
    assert (vectors.grad.abs().sum(dim=0) > 0).all(), "some column of the vectors is never read"
    if N:
        assert (dense.grad.abs().sum(dim=0) > 0).all()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if VARIANTS[variant][1].get("batch_norm") and name.endswith("bias") and parameter.grad.abs().sum() < 1e-5:
            continue  # batch norm subtracts the bias before it again: its gradient is zero but for rounding
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("variant", VARIANTS)
def test_samples_do_not_see_each_other_in_eval_mode(variant):
    model = make(variant, 4, 5, 3).eval()
    vectors, dense = make_input(model, 7)
    whole = model(vectors, dense)
    torch.testing.assert_close(model(vectors, dense), whole, rtol=0, atol=0)
    alone = torch.cat([model(vectors[i : i + 1], dense[i : i + 1]) for i in range(7)])
    torch.testing.assert_close(alone, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_seed_decides_all_parameters(variant):
    first, same, other = (make(variant, 4, 5, 3, seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("variant", VARIANTS)
def test_state_dict_round_trip(variant):
    model, copy = make(variant, 4, 5, 3, seed=0), make(variant, 4, 5, 3, seed=9)
    vectors, dense = make_input(model, 6)
    model(vectors, dense)  # in train mode: moves the running statistics of batch norm
    copy.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(vectors, dense), copy.eval()(vectors, dense))


def count_by_formula(name, model_options, F, D, N):
    options = {**model_card(name).options, **model_options}
    if name == "finalmlp" and options["second_hidden"] is None:
        options["second_hidden"] = options["hidden"]

    def plain_mlp(n, hidden, out=None):
        widths = [n, *hidden] if out is None else [n, *hidden, out]
        return sum((a + 1) * b for a, b in itertools.pairwise(widths))

    def mlp(n, hidden, out=None):
        return plain_mlp(n, hidden, out) + (2 * sum(hidden) if options.get("batch_norm") else 0)

    def last(n, hidden):
        return hidden[-1] if hidden else n

    def gate(context):
        return plain_mlp(len(context) * D or D, options["gate_hidden"], F * D + N) + (0 if context else D)

    names = {**options, "F": F, "D": D, "N": N, "X": F * D + N, "mlp": mlp, "last": last, "gate": gate}
    return eval(model_card(name).parameters, {"__builtins__": {}}, names)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("F", "D", "N"), [(1, 4, 0), (2, 1, 1), (7, 5, 13), (3, 16, 0)])
def test_parameter_count_is_the_documented_formula(variant, F, D, N):
    name, options = VARIANTS[variant]
    model = make(variant, F, D, N)
    counted = sum(math.prod(parameter.shape) for parameter in model.parameters())
    assert counted == count_by_formula(name, options, F, D, N), model_card(name).parameters


def test_width_of_vectors():
    widths = {name: model.vector_width(10) for name, model in MODELS.items()}
    assert widths == {
        "lr": 1, "fm": 11, "dnn": 10, "wide_deep": 11, "deepfm": 11, "dlrm": 10, "dcnv2": 10, "autoint": 11,
        "finalmlp": 10,
    }  # fmt: skip


def test_wrong_shapes_are_named():
    model = make("deepfm", 3, 4, 2)
    with pytest.raises(ShapeError, match=r"\(2, 3, 4\).*\[B, 3, 5\]"):
        model(torch.zeros(2, 3, 4), torch.zeros(2, 2))
    with pytest.raises(ShapeError, match=r"\(2, 1\).*\[2, 2\]"):
        model(torch.zeros(2, 3, 5), torch.zeros(2, 1))
    with pytest.raises(ShapeError, match=r"\(3, 5\)"):
        model(torch.zeros(3, 5), torch.zeros(3, 2))


@pytest.mark.parametrize(("F", "D", "N"), [(0, 4, 1), (3, 0, 1), (3, 4, -1)])
def test_impossible_sizes(F, D, N):
    with pytest.raises(ConfigError, match="must be at least"):
        build_model("dnn", num_features=F, dim=D, num_dense=N, options={})
