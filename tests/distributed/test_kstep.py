"""k-step Adam against its formulas, against torch.optim, with uneven ranks, overlapped, saved and loaded, and misused."""

import io

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from hotbed.checkpoint.files import dense_tensors, load_optimizer
from hotbed.errors import ConfigError, RankError
from hotbed.optim import KStepAdam
from hotbed.parallel.mesh import Mesh
from tests.distributed import kstep_reference as reference
from tests.distributed.kstep_reference import GROUPS, SHAPES, SIZES, Case
from tests.distributed.ranks import run_ranks

RULES = ("params", "moments", "shared_v", "frozen_v")


class Weights(nn.Module):
    """The weights of the reference, its gradients, and a running statistic."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        pieces = np.split(reference.first_weights(), np.cumsum(SIZES)[:-1])
        values = [torch.tensor(piece, dtype=dtype).view(shape) for piece, shape in zip(pieces, SHAPES)]
        self.weights = nn.ParameterList(values)
        self.register_buffer("average", torch.zeros(2, dtype=dtype))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def groups(self):
        return [
            {"params": part, "lr": lr, "betas": betas}
            for part, (_, lr, betas) in zip([list(self.weights[:2]), list(self.weights[2:])], GROUPS)
        ]

    def flat(self):
        return torch.cat([one.detach().reshape(-1) for one in self.weights]).cpu().numpy().copy()

    def backward(self, rank, step):
        gradients = np.split(reference.gradient(rank, step, self.flat().astype(np.float64)), np.cumsum(SIZES)[:-1])
        for one, gradient in zip(self.weights, gradients):
            one.grad = torch.tensor(gradient, dtype=one.dtype, device=one.device).view_as(one)

    def look(self, rank, step):
        """As batch norm: a running mean of what this rank sees."""
        self.average.mul_(0.9).add_(0.1 * (rank + step))
        self.count.add_(1)


def optimizer_of(model, case, **more):
    mesh = None if case.nodes == 1 else Mesh(nodes=case.nodes, local=dist.get_world_size() // case.nodes)
    names = ("k", "inner", "weight_decay", "momentum", "across_only", "scale_lr")
    settings = {name: getattr(case, name) for name in names} | {"merge": case.rule, "overlap": case.delay > 0} | more
    return KStepAdam(model.groups(), delay=case.delay or None, mesh=mesh, buffers=model.buffers(), **settings)


def rank_and_world():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def steps(model, optimizer, case, numbers):
    rank, _ = rank_and_world()
    for step in numbers:
        model.backward(rank, step)
        model.look(rank, step)
        if case.weight(rank, step) == 0:
            optimizer.zero_grad()
        optimizer.step(weight=case.weight(rank, step))
        if step in case.merges:
            optimizer.merge(moments=case.all_moments)


def moments_of(optimizer, name):
    states = [optimizer.state[one] for group in optimizer.param_groups for one in group["params"]]
    return torch.cat([state[name].reshape(-1) for state in states]).cpu().numpy() if name in states[0] else None


def trained(cases, dtype=torch.float64, device="cpu"):
    results = []
    for case in cases:
        model = Weights(dtype).to(device)
        optimizer = optimizer_of(model, case)
        steps(model, optimizer, case, range(1, case.steps + 1))
        moments = [moments_of(optimizer, name) for name in ("exp_avg", "exp_avg_sq")]
        results.append((model.flat(), *moments, model.average.cpu()))
        optimizer.state_dict()  # nothing stays on its way
    return results


def check(cases, world, device="cpu"):
    found = run_ranks(trained, world, cases, torch.float64, device)
    for number, case in enumerate(cases):
        expected = reference.train(case, world)
        for rank in range(world):
            x, m, v, _ = found[rank][number]
            np.testing.assert_allclose(x, expected[rank].x, rtol=1e-11, atol=1e-12, err_msg=f"{case}")
            if case.inner != "sgd":
                np.testing.assert_allclose(m, expected[rank].m, rtol=1e-10, atol=1e-12, err_msg=f"{case}")
                np.testing.assert_allclose(v, expected[rank].v, rtol=1e-10, atol=1e-12, err_msg=f"{case}")
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_every_rule_is_its_formula(world):
    cases = [
        Case(rule, k, delay, merges=merges, all_moments=k == 4)
        for rule in RULES
        for k, delay, merges in [(4, 0, (13,)), (4, 1, ()), (4, 3, (9, 13)), (5, 5, (7,)), (3, 0, ()), (64, 0, (13,))]
    ]
    cases += [Case("params", 4, 0, inner="adamw", weight_decay=0.1), Case("moments", 4, 2, weight_decay=0.1)]
    cases += [Case("frozen_v", 4, 2, inner="adamw", weight_decay=0.1), Case("frozen_v", 4, 2, weight_decay=0.1)]
    cases += [Case("frozen_v", 4, 2, scale_lr=True)]
    cases += [
        Case("frozen_v", k, delay, steps=45, merges=merges) for k, delay, merges in ((16, 10, ()), (64, 0, (13,)))
    ]
    cases += [Case("moments", 4, 0, inner="sgd", momentum=0.9), Case("params", 4, 1, inner="sgd")]
    cases += [Case(k=4, scale_lr=True), Case(k=4, scale_lr=True, inner="adamw", weight_decay=0.1)]
    found = check(cases, world)
    for number, case in enumerate(cases):
        results = [found[rank][number] for rank in range(world)]
        same = [
            np.array_equal(results[0][0], result[0]) and torch.equal(results[0][3], result[3]) for result in results
        ]
        assert all(same) == (case.steps in case.merges), (
            case
        )  # merge() leaves the same bits on all ranks, statistics too


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_step_is_synchronous(world, dtype):
    """k = 1 is torch.optim on the mean gradient, whatever the rule."""
    cases = [Case(rule, 1, 0, merges=(13,)) for rule in RULES]
    cases += [
        Case("params", 1, 0, inner=inner, weight_decay=0.1, momentum=0.5 * (inner == "sgd"))
        for inner in ("adamw", "sgd")
    ]
    found = run_ranks(trained, world, cases, dtype)
    for number, case in enumerate(cases):
        model = Weights(dtype)
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[case.inner]
        groups = model.groups()
        if case.inner == "sgd":
            groups = [{"params": group["params"], "lr": group["lr"], "momentum": case.momentum} for group in groups]
        plain = kind(groups, weight_decay=case.weight_decay)
        for step in range(1, case.steps + 1):
            gradients = []
            for rank in range(world):
                model.backward(rank, step)
                gradients.append([one.grad for one in model.weights])
            for one, each in zip(model.weights, zip(*gradients)):
                one.grad = sum(each) / world
            plain.step()
        rtol = 1e-12 if dtype == torch.float64 else 3e-5
        for rank in range(world):
            np.testing.assert_allclose(
                found[rank][number][0], model.flat(), rtol=rtol, atol=rtol / 10, err_msg=f"{case}"
            )
            assert np.array_equal(found[rank][number][0], found[0][number][0])
            if world == 1:
                assert np.array_equal(found[rank][number][0], model.flat()), case


def test_alone_it_is_adam_to_the_bit():
    """Also with k > 1, without a process group, and with a parameter that has no gradient."""
    for rule in RULES:
        ours, theirs = Weights(torch.float32), Weights(torch.float32)
        optimizer = KStepAdam(ours.groups(), k=4, merge=rule)
        plain = torch.optim.Adam(theirs.groups())
        for step in range(1, 10):
            for model, one in ((ours, optimizer), (theirs, plain)):
                model.backward(0, step)
                model.weights[1].grad = None
                one.step()
        optimizer.merge()
        assert np.array_equal(ours.flat(), theirs.flat())


class Tug(nn.Module):
    """One weight that a rank pulls to zero by 4 and two others push away by 1: the mean is a valley with its floor at zero."""

    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.tensor([2.0]))

    def loss(self, rank):
        return (4.0 if rank == 0 else -1.0) * torch.where(
            self.x.abs() < 1, self.x.square() / 2, self.x.abs() - 0.5
        ).sum()


def pulled(rules):
    ends = []
    for rule in rules:
        model = Tug()
        optimizer = KStepAdam(model.parameters(), lr=0.01, k=8, merge=rule, delay=2)
        for _ in range(1200):
            optimizer.zero_grad()
            model.loss(dist.get_rank()).backward()
            optimizer.step()
        optimizer.merge()
        ends.append(float(model.x))
    return ends


def test_local_adam_runs_away_where_the_default_converges():
    """Two ranks of three outvote the third if each divides by its own second moment: then only signs are left."""
    naive, default = run_ranks(pulled, 3, ("params", None))[0]
    assert naive > 5
    assert abs(default) < 0.05


def denominators():
    """What each rank divides by after equal steps: its first moment over its move."""
    model = Tug()
    optimizer = KStepAdam(model.parameters(), lr=0.01, k=8, overlap=False, scale_lr=False)
    for _ in range(12):
        optimizer.zero_grad()
        model.loss(dist.get_rank()).backward()
        before = model.x.detach().clone()
        optimizer.step()
    moved = float(before - model.x.detach()) / 0.01
    return float(optimizer.state[model.x]["exp_avg"]) / (1 - 0.9**12) / moved


def test_all_ranks_divide_by_one_second_moment():
    found = run_ranks(denominators, 2)
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert found[0] > 1


def test_uneven_ranks():
    """Rank 0 ends early, rank 1 skips and both count by their samples; across nodes and inside."""
    uneven = (tuple([2.0] * 5 + [0.0] * 8), tuple([3.0, 0.0, 1.0] * 4 + [3.0]), (1.0,) * 13, (0.0, 1.0) * 6 + (1.0,))
    for world in (2, 4):
        cases = [
            Case(rule, k, delay, weights=uneven[:world], merges=(13,))
            for rule in RULES
            for k, delay in [(4, 0), (4, 2)]
        ]
        check([*cases, Case("params", 1, 0, weights=uneven[:world])], world)
        nobody = tuple(one[:4] + (0.0,) * 9 for one in uneven[:world])  # from step 5 on no rank has samples
        check([Case("frozen_v", 4, delay, weights=nobody, merges=(13,)) for delay in (0, 2)], world)


def test_across_nodes_only():
    """Gradients are averaged in each of two nodes every step, weights across nodes every k."""
    cases = [Case(rule, 4, delay, nodes=2, across_only=True, merges=(13,)) for rule in RULES for delay in (0, 2)]
    cases += [Case("params", 4, 2, nodes=2), Case("params", 1, 0, nodes=2, scale_lr=True)]
    cases += [Case("params", 4, 2, nodes=2, across_only=True, scale_lr=True)]
    found = check(cases, 4)
    open_end = [Case(rule, 4, 2, nodes=2, across_only=True) for rule in RULES]
    found = run_ranks(trained, 4, open_end)
    for number in range(len(open_end)):
        first, second, third, fourth = (found[rank][number][0] for rank in range(4))
        assert np.array_equal(first, second)
        assert np.array_equal(third, fourth)
        assert not np.array_equal(first, third)


def test_overlap_repeats():
    """The bits depend on step numbers, not on when a mean arrives."""
    cases = [Case(rule, 4, 3, merges=(11,)) for rule in RULES]
    first, second = run_ranks(trained, 3, cases, torch.float32), run_ranks(trained, 3, cases, torch.float32)
    for one, other in zip(first, second):
        for results, again in zip(one, other):
            assert all(np.array_equal(a, b) for a, b in zip(results[:3], again[:3]))


def resumed(cases, stop, through_checkpoint):
    """The weights at the end, once in one go, once saved after `stop` steps and loaded into other objects."""
    results = []
    for case in cases:
        model = Weights(torch.float32)
        optimizer = optimizer_of(model, case)
        steps(model, optimizer, case, range(1, stop + 1))
        if through_checkpoint:
            saved = dense_tensors(model, optimizer)
        else:
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.seek(0)
        steps(model, optimizer, case, range(stop + 1, case.steps + 1))
        other = Weights(torch.float32)
        going_on = optimizer_of(other, case)
        steps(other, going_on, case, range(1, 4))  # what it held before does not matter
        if through_checkpoint:
            other.load_state_dict(saved["dense"])
            load_optimizer(going_on, saved["dense_optimizer"])
        else:
            loaded = torch.load(file, weights_only=True)
            other.load_state_dict(loaded["model"])
            going_on.load_state_dict(loaded["optimizer"])
        steps(other, going_on, case, range(stop + 1, case.steps + 1))
        ends = [moments_of(one, "exp_avg_sq") for one in (optimizer, going_on)]
        results.append((model.flat(), other.flat(), *ends))
        optimizer.merge()
        going_on.merge()
    return results


@pytest.mark.parametrize("through_checkpoint", [True, False])
def test_resume_continues_to_the_bit(through_checkpoint):
    """Step 6: two steps after a merge started, one before it is used."""
    cases = [Case(rule, 4, delay, steps=11) for rule in RULES for delay in (0, 3)]
    cases += [Case("moments", 4, 3, steps=11, inner="sgd", momentum=0.9), Case("params", 1, 0, steps=11)]
    cases += [Case("shared_v", 4, 3, steps=11, nodes=2, across_only=True)]
    for world in (1, 4) if through_checkpoint else (2,):
        cases = [case for case in cases if world % case.nodes == 0 and (case.nodes == 1 or world == 4)]
        for results in run_ranks(resumed, world, cases, 6, through_checkpoint):
            for case, (whole, parts, *ends) in zip(cases, results):
                assert np.array_equal(whole, parts), case
                assert case.inner == "sgd" or np.array_equal(*ends), case


def equal_states():
    model = Weights()
    optimizer = optimizer_of(model, Case("params", 4, 2))
    steps(model, optimizer, Case(), range(1, 8))
    optimizer.merge(moments=True)
    return model.flat(), optimizer.state_dict()


def test_one_state_for_all():
    """After merge(moments=True) any rank's state is that of all, and one process goes on from it with torch's Adam."""
    found = run_ranks(equal_states, 3)
    for weights, state in found:
        assert np.array_equal(weights, found[0][0])
        for number, entry in state["state"].items():
            assert all(torch.equal(value, found[0][1]["state"][number][name]) for name, value in entry.items())
    model = Weights()
    plain = torch.optim.Adam(model.groups())
    plain.load_state_dict(found[0][1])
    alone = KStepAdam(model.groups())
    alone.load_state_dict(plain.state_dict())
    assert torch.equal(alone.state[model.weights[0]]["exp_avg"], found[0][1]["state"][0]["exp_avg"])
    assert alone.state_dict()["state"][0]["step"] == 7


def merged_without_samples(cases):
    """From step 13 on nobody has samples, while a mean travels or after it was used."""
    results = []
    for case in cases:
        model = Weights(torch.float32)
        optimizer = optimizer_of(model, case)
        steps(model, optimizer, case, range(1, 13))
        for _ in range(case.steps - 12):
            optimizer.zero_grad()
            optimizer.step(weight=0)
        optimizer.merge(moments=case.all_moments)
        results.append((model.flat(), optimizer.state_dict()["state"]))
    return results


def test_a_merge_after_steps_without_samples_leaves_the_same_bits():
    cases = [
        Case(rule, 4, delay, steps=12 + idle, all_moments=all_moments)
        for rule in RULES
        for delay, idle in ((0, 2), (3, 1), (1, 2))
        for all_moments in (False, True)
    ]
    found = run_ranks(merged_without_samples, 3, cases)
    for number, case in enumerate(cases):
        first = found[0][number]
        for rank in (1, 2):
            x, state = found[rank][number]
            assert np.array_equal(x, first[0]), case
            if case.all_moments:
                pairs = [(state[one][name], value) for one in first[1] for name, value in first[1][one].items()]
                assert all(torch.equal(*pair) for pair in pairs), case


def starts_equal():
    model = Weights()
    with torch.no_grad():
        for one in model.parameters():
            one.add_(dist.get_rank())
    KStepAdam(model.groups())
    return model.flat()


def test_all_start_from_rank_0():
    for found in run_ranks(starts_equal, 2):
        assert np.array_equal(found, reference.first_weights())


def misused():
    model = Weights()
    optimizer = optimizer_of(model, Case(), k=2 + dist.get_rank())
    with pytest.raises(RankError, match=r"different numbers of steps \(this one after [23]\)"):
        steps(model, optimizer, Case(), range(1, 4))
    return "refused"


def test_ranks_out_of_step_are_found():
    assert run_ranks(misused, 2) == ["refused"] * 2


def test_mistakes():
    model = Weights()
    with pytest.raises(
        ConfigError, match=r"k is the number.*given: 0.*merge is one of.*'mean'.*inner is one of.*'lamb'"
    ):
        KStepAdam(model.groups(), k=0, merge="mean", inner="lamb")
    with pytest.raises(ConfigError, match=r"delay is at least 1 and at most k \(4\).*given: 5"):
        KStepAdam(model.groups(), k=4, delay=5)
    with pytest.raises(ConfigError, match='"sgd" has none'):
        KStepAdam(model.groups(), inner="sgd", merge="shared_v")
    with pytest.raises(ConfigError, match="needs to know the nodes"):
        KStepAdam(model.groups(), across_only=True)
    with pytest.raises(ConfigError, match=r"one type and device; given: torch.float32 on cpu, torch.float64 on cpu"):
        KStepAdam([torch.zeros(2), torch.zeros(2, dtype=torch.float64)])
    with pytest.raises(ConfigError, match=r"float32 or float64; given: torch.bfloat16"):
        KStepAdam([torch.zeros(2, dtype=torch.bfloat16)])
    optimizer = KStepAdam(model.groups())
    with pytest.raises(ConfigError, match="cannot be added"):
        optimizer.add_param_group({"params": [torch.zeros(2)]})
    with pytest.raises(ConfigError, match="at least 0; given: -1"):
        optimizer.step(weight=-1)
    with pytest.raises(ConfigError, match=r"groups of \[1\] parameters, this optimizer of \[2, 1\]"):
        optimizer.load_state_dict(KStepAdam([torch.zeros(2)]).state_dict())
    saved = optimizer.state_dict()
    saved["state"][1]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ConfigError, match=r"exp_avg of parameter 1 has the shape \(3,\), the parameter \(5,\)"):
        optimizer.load_state_dict(saved)
    model.float()
    with pytest.raises(ConfigError, match=r"parameter or buffer 0 .* other memory after the optimizer was built"):
        optimizer.step()


def test_sparse_gradients_are_refused():
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = KStepAdam(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="sparse; k-step merging is for dense weights"):
        optimizer.step()


def sent_bytes(ks, rule):
    found = []
    for k in ks:
        mesh = Mesh(nodes=2, local=1)
        model = Weights(torch.float32)
        optimizer = KStepAdam(model.groups(), k=k, mesh=mesh, merge=rule)
        before, collectives = mesh.traffic.across, mesh.traffic.num_collectives
        steps(model, optimizer, Case(), range(1, 17))
        optimizer.state_dict()
        found.append((mesh.traffic.num_collectives - collectives, mesh.traffic.across - before))
    return found


def test_traffic_falls_with_k():
    """One collective per merge: 15 floats and their weight at k = 1, and two numbers of the step more above."""
    for found in run_ranks(sent_bytes, 2, (1, 4, 16), "params"):
        assert found == [(16, 16 * 16 * 4), (4, 4 * 18 * 4), (1, 18 * 4)]


def test_a_frozen_second_moment_travels_with_the_weights():
    """Until the first one is there, after k steps or eight, gradients and squares do."""
    for found in run_ranks(sent_bytes, 2, (4, 64), None):
        assert found == [(4 + 4, 4 * 31 * 4 + 4 * 33 * 4), (8 + 2, 8 * 31 * 4 + 2 * 33 * 4)]


@pytest.mark.gpu
def test_on_one_gpu_over_gloo():
    """Two ranks share a device; sums go in the background and on a stream beside the one that trains."""
    cases = [Case(rule, 4, delay, merges=(13,)) for rule in RULES for delay in (0, 2)]
    check([*cases, Case("params", 1, 0), Case("params", 4, 2, nodes=2), Case("params", 1, 0, nodes=2)], 2, "cuda")
