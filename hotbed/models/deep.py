"""Models around an MLP: plain, Wide & Deep, DCN-V2 (cross layers), DLRM (products of pairs), MMoE (experts), FinalMLP (two)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hotbed.errors import ConfigError
from hotbed.models.base import Activation, Count, CountOrZero, Model, ModelSchema, Numbers, Rate, Widths
from hotbed.models.layers import MLP, CrossNetwork, LinearTerm, join, linear, split_first_order


class DNN(Model):
    """An MLP over the concatenated id vectors and dense features.

    logit = MLP([v_1, ..., v_F, dense]). All interactions are implicit; with enough data and a good dropout or L2 it is
    hard to beat.

    Reference: Covington et al., Deep Neural Networks for YouTube Recommendations, RecSys 2016
    Parameters: mlp(F * D + N, hidden, 1)
    """

    def __init__(
        self,
        num_features: int,
        dim: int,
        num_dense: int,
        *,
        hidden: Widths = (128, 64),
        dropout: Rate = 0.0,
        batch_norm: bool = False,
        activation: Activation = "relu",
    ) -> None:
        super().__init__(num_features, dim, num_dense)
        width = num_features * dim + num_dense
        self.mlp = MLP(width, hidden, 1, dropout=dropout, batch_norm=batch_norm, activation=activation)

    def logits(self, vectors: Tensor, dense: Tensor) -> Tensor:
        return self.mlp(join(vectors, dense)).squeeze(1)


class WideDeep(Model):
    """A linear term and an MLP, trained together.

    logit = b + sum_f w_f + <u, dense> + MLP([v_1, ..., v_F, dense]). The wide half here is the first-order weight of
    every id; crossed columns, if wanted, are features of the data.

    Reference: Cheng et al., Wide & Deep Learning for Recommender Systems, DLRS 2016, arXiv 1606.07792
    Parameters: 1 + N + mlp(F * D + N, hidden, 1)
    """

    def __init__(
        self,
        num_features: int,
        dim: int,
        num_dense: int,
        *,
        hidden: Widths = (128, 64),
        dropout: Rate = 0.0,
        batch_norm: bool = False,
        activation: Activation = "relu",
    ) -> None:
        super().__init__(num_features, dim, num_dense)
        width = num_features * dim + num_dense
        self.linear = LinearTerm(num_dense)
        self.mlp = MLP(width, hidden, 1, dropout=dropout, batch_norm=batch_norm, activation=activation)

    @staticmethod
    def vector_width(dim: int) -> int:
        return dim + 1

    def logits(self, vectors: Tensor, dense: Tensor) -> Tensor:
        embeddings, weights = split_first_order(vectors)
        return self.linear(weights, dense) + self.mlp(join(embeddings, dense)).squeeze(1)


class DCNv2(Model):
    """Explicit crosses of bounded order, with an MLP in parallel or stacked on top.

    x_0 = [v_1, ..., v_F, dense]; x_{l+1} = x_0 * (W_l x_l + b_l) + x_l for `num_cross` layers; then logit =
    <w, [x_L, MLP(x_0)]> + b (parallel) or <w, MLP(x_L)> + b (stacked). With `low_rank` r > 0 every W_l is a product of
    two matrices with inner width r, which costs 2 X r instead of X^2 (X = F * D + N).

    Reference: Wang et al., DCN V2: Improved Deep & Cross Network, WWW 2021, arXiv 2008.13535
    Parameters: num_cross * X * ((2 * low_rank or X) + 1) + mlp(X, hidden) + last(X, hidden) + 1
        + (X if structure == "parallel" else 0)
    """

    def __init__(
        self,
        num_features: int,
        dim: int,
        num_dense: int,
        *,
        structure: Literal["parallel", "stacked"] = "parallel",
        num_cross: Count = 2,
        low_rank: CountOrZero = 0,
        hidden: Widths = (128, 64),
        dropout: Rate = 0.0,
        batch_norm: bool = False,
        activation: Activation = "relu",
    ) -> None:
        super().__init__(num_features, dim, num_dense)
        width = num_features * dim + num_dense
        self.parallel = structure == "parallel"
        self.cross = CrossNetwork(width, num_cross, low_rank)
        self.mlp = MLP(width, hidden, dropout=dropout, batch_norm=batch_norm, activation=activation)
        self.out = linear(self.mlp.num_out + (width if self.parallel else 0), 1)

    def logits(self, vectors: Tensor, dense: Tensor) -> Tensor:
        x0 = join(vectors, dense)
        crossed = self.cross(x0)
        top = torch.cat([crossed, self.mlp(x0)], dim=1) if self.parallel else self.mlp(crossed)
        logits: Tensor = self.out(top)
        return logits.squeeze(1)


def pair_dots(vectors: Tensor, pairs: Tensor, places: Tensor) -> Tensor:
    """<v_i, v_j> [B, P] of the pairs of vectors [B, F, D]; torch's own operations where it compiles or exports a model."""
    if vectors.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        dots: Tensor = _PairDots.apply(vectors, pairs, places)  # type: ignore[no-untyped-call]
        return dots
    return _dots(vectors, pairs)


def _dots(vectors: Tensor, pairs: Tensor) -> Tensor:
    return torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, pairs)


class _PairDots(torch.autograd.Function):
    """d dots / d v_i = sum of g_ij v_j: one product with a symmetric matrix that is gathered.

    Autograd makes two products, and scatters the gradients of the pairs, which in torch's repeatable mode sorts them.
    """

    generate_vmap_rule = True  # for torch.func

    @staticmethod
    def forward(vectors: Tensor, pairs: Tensor, places: Tensor) -> Tensor:
        return _dots(vectors, pairs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        vectors, _, places = inputs
        ctx.save_for_backward(vectors, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        vectors, places = ctx.saved_tensors
        size, num_vectors, _ = vectors.shape
        of_pairs = nn.functional.pad(grad, (0, 1)).index_select(1, places)
        of_pairs = of_pairs.view(size, num_vectors, num_vectors)
        products = torch.bmm(of_pairs, vectors.to(grad.dtype))  # under autocast they were multiplied in this type, too
        return products.to(vectors.dtype), None, None


class DLRM(Model):
    """Pairwise dot products between id vectors and a vector made of the dense features.

    z = MLP_bottom(dense) in R^D; logit = MLP_top([z, <a_i, a_j> for all i < j]) over a = (v_1, ..., v_F, z). Without
    dense features there is no z, and the top MLP sees the dot products alone. With interaction="cat" the top sees
    [a_1, a_2, ...] itself instead. `hidden` is the top MLP, `bottom` the layers before the D outputs of the bottom
    MLP; dropout acts in the top.

    Reference: Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems, 2019,
        arXiv 1906.00091
    Parameters: (mlp(N, bottom, D) if N else 0)
        + mlp((F + (N > 0)) * D if interaction == "cat" else (D + (F + 1) * F // 2 if N else F * (F - 1) // 2), hidden, 1)
    """

    pairs: Tensor  # int64 [P], places of the pairs i > j in a flattened [F, F] (or [F + 1, F + 1]) matrix
    places: Tensor  # int64 [F * F], the other way round: the pair at each place; P on the diagonal

    def __init__(
        self,
        num_features: int,
        dim: int,
        num_dense: int,
        *,
        hidden: Widths = (128, 64),
        bottom: Widths = (128,),
        interaction: Literal["dot", "cat"] = "dot",
        dropout: Rate = 0.0,
        batch_norm: bool = False,
        activation: Activation = "relu",
    ) -> None:
        super().__init__(num_features, dim, num_dense)
        num_vectors = num_features + (num_dense > 0)
        rows, columns = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.register_buffer("pairs", rows * num_vectors + columns, persistent=False)
        places = torch.full((num_vectors, num_vectors), len(rows))
        places[rows, columns] = places[columns, rows] = torch.arange(len(rows))
        self.register_buffer("places", places.flatten(), persistent=False)
        if num_dense:
            self.bottom = MLP(num_dense, bottom, dim, batch_norm=batch_norm, activation=activation)
        self.dot = interaction == "dot"
        width = len(rows) + (dim if num_dense else 0) if self.dot else num_vectors * dim
        self.top = MLP(width, hidden, 1, dropout=dropout, batch_norm=batch_norm, activation=activation)

    def logits(self, vectors: Tensor, dense: Tensor) -> Tensor:
        if self.num_dense:
            z = self.bottom(dense)
            vectors = torch.cat([vectors, z.unsqueeze(1)], dim=1)
        if not self.dot:
            return self.top(vectors.flatten(1)).squeeze(1)
        dots = pair_dots(vectors, self.pairs, self.places)
        return self.top(torch.cat([z, dots], dim=1) if self.num_dense else dots).squeeze(1)


class MMoE(Model):
    """Experts that all tasks share, mixed by a gate of each task.

    x = [v_1, ..., v_F, dense]; for task t: f_t = sum_e softmax(G_t x)_e MLP_e(x), logit_t = MLP_t(f_t). Returns [B, T], the
    label first; with no further label (`hotbed prepare --task`) it is one task, [B].

    Reference: Ma et al., Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts, KDD 2018
    Parameters: E * mlp(X, experts) + T * ((X + 1) * E + mlp(last(X, experts), hidden, 1))
    """

    def __init__(
        self,
        num_features: int,
        dim: int,
        num_dense: int,
        schema: ModelSchema,
        *,
        num_experts: Count = 4,
        experts: Widths = (64,),
        hidden: Widths = (32,),
        dropout: Rate = 0.0,
        batch_norm: bool = False,
        activation: Activation = "relu",
    ) -> None:
        super().__init__(num_features, dim, num_dense)
        width, tasks = num_features * dim + num_dense, schema.tasks or ("label",)
        mlp = partial(MLP, dropout=dropout, batch_norm=batch_norm, activation=activation)
        self.experts = nn.ModuleList(mlp(width, experts) for _ in range(num_experts))
        mixed = experts[-1] if experts else width
        self.gates = nn.ModuleList(linear(width, num_experts) for _ in tasks)
        self.towers = nn.ModuleList(mlp(mixed, hidden, 1) for _ in tasks)

    def logits(self, vectors: Tensor, dense: Tensor) -> Tensor:
        x = join(vectors, dense)
        found = torch.stack([expert(x) for expert in self.experts], dim=1)  # [B, E, H]
        outputs = []
        for gate, tower in zip(self.gates, self.towers):
            shares = torch.softmax(gate(x), dim=1).unsqueeze(1)  # [B, 1, E]
            outputs.append(tower(torch.bmm(shares, found).squeeze(1)))
        return outputs[0].squeeze(1) if len(outputs) == 1 else torch.cat(outputs, dim=1)


class FinalMLP(Model):
    """Two streams of MLPs whose outputs meet in a multi-head bilinear form.

    x = [v_1, ..., v_F, dense]; a = MLP_1(g_1 * x), b = MLP_2(g_2 * x); logit = <w_a, a> + <w_b, b> + c +
    sum_h a_h^T W_h b_h over `num_heads` equal pieces of a and b. With `gating`, g_i = 2 sigmoid(MLP(context_i)) weighs
    the inputs of stream i, where context_i is the vectors of the features numbered in `context` and `second_context`,
    or a learned vector of D numbers when the list is empty; otherwise g_i = 1. The second stream takes the first one's
    hidden layers and dropout unless it has its own. A gate counts as mlp(len(context) * D or D, gate_hidden, X), never
    with batch norm, and D more when its context is learned.

    Reference: Mao et al., FinalMLP: An Enhanced Two-Stream MLP Model for CTR Prediction, AAAI 2023, arXiv 2304.00902
    Parameters: mlp(X, hidden) + mlp(X, second_hidden) + last(X, hidden) + last(X, second_hidden) + 1
        + last(X, hidden) * last(X, second_hidden) // num_heads
        + (gate(context) + gate(second_context) if gating else 0)
    """

    def __init__(
        self,
        num_features: int,
        dim: int,
        num_dense: int,
        *,
        hidden: Widths = (128, 64),
        second_hidden: Widths | None = None,
        dropout: Rate = 0.0,
        second_dropout: Rate | None = None,
        batch_norm: bool = False,
        activation: Activation = "relu",
        num_heads: Count = 1,
        gating: bool = False,
        gate_hidden: Widths = (64,),
        context: Numbers = (),
        second_context: Numbers = (),
    ) -> None:
        super().__init__(num_features, dim, num_dense)
        width = num_features * dim + num_dense
        second_hidden = hidden if second_hidden is None else second_hidden
        second_dropout = dropout if second_dropout is None else second_dropout
        self.first = MLP(width, hidden, dropout=dropout, batch_norm=batch_norm, activation=activation)
        self.second = MLP(width, second_hidden, dropout=second_dropout, batch_norm=batch_norm, activation=activation)
        self.fusion = BilinearFusion(self.first.num_out, self.second.num_out, num_heads)
        self.gates = nn.ModuleList(
            FeatureGate(num_features, dim, width, hidden=gate_hidden, context=features)
            for features in ((context, second_context) if gating else ())
        )

    def logits(self, vectors: Tensor, dense: Tensor) -> Tensor:
        first = second = join(vectors, dense)
        if self.gates:
            first, second = first * self.gates[0](vectors), second * self.gates[1](vectors)
        return self.fusion(self.first(first), self.second(second))


class FeatureGate(nn.Module):
    """2 sigmoid(MLP(context)): one factor per input column, [B, width], or [width] when the context is learned."""

    __call__: Callable[..., Tensor]
    learned: nn.Parameter | None

    def __init__(self, num_features: int, dim: int, width: int, *, hidden: Widths, context: Numbers) -> None:
        super().__init__()
        wrong = [number for number in context if number >= num_features]
        if wrong:
            raise ConfigError(f"FinalMLP: context names features {wrong}; there are {num_features}, counted from 0.")
        self.context = list(context)
        self.mlp = MLP(max(1, len(context)) * dim, hidden, width)
        learned = None if context else nn.Parameter(nn.init.normal_(torch.empty(dim), std=0.05))
        self.register_parameter("learned", learned)

    def forward(self, vectors: Tensor) -> Tensor:
        context = vectors[:, self.context].flatten(1) if self.learned is None else self.learned
        return 2.0 * self.mlp(context).sigmoid()


class BilinearFusion(nn.Module):
    """<w_a, a> + <w_b, b> + c + sum_h a_h^T W_h b_h: [B, H1], [B, H2] -> [B]."""

    __call__: Callable[..., Tensor]

    def __init__(self, width_a: int, width_b: int, num_heads: int) -> None:
        super().__init__()
        if width_a % num_heads or width_b % num_heads:
            raise ConfigError(
                f"FinalMLP: num_heads {num_heads} must divide the last hidden width of both streams, {width_a} and "
                f"{width_b}."
            )
        self.linear_a = linear(width_a, 1)
        self.linear_b = linear(width_b, 1, bias=False)
        shape = (num_heads, width_a // num_heads, width_b // num_heads)
        std = (2.0 / (shape[1] + shape[2])) ** 0.5
        self.weight = nn.Parameter(nn.init.normal_(torch.empty(shape), std=std))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        heads, width_a, width_b = self.weight.shape
        a_heads = a.view(-1, heads, width_a).transpose(0, 1)  # [heads, B, H1 / heads]
        b_heads = b.view(-1, heads, width_b).transpose(0, 1)
        bilinear = (torch.bmm(a_heads, self.weight) * b_heads).sum(dim=(0, 2))
        linear_part: Tensor = self.linear_a(a) + self.linear_b(b)
        return linear_part.squeeze(1) + bilinear
