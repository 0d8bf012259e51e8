"""What each model can learn: two ids that only matter together, and two that matter alone."""

import pytest
import torch
import torch.nn.functional as F

from hotbed.models import MODELS, build_model

NUM_IDS = 16
OPTIONS = {name: {"hidden": (32,)} for name in MODELS if name not in ("lr", "fm")}


def planted(kind, num_samples, seed):
    """Ids [B, 3] and labels [B]: the signs of ids 0 and 1 multiplied (interaction) or added (main); id 2 is noise."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(NUM_IDS, (num_samples, 3), generator=generator)
    signs = 1.0 - 2.0 * (ids % 2)
    logit = 4 * signs[:, 0] * signs[:, 1] if kind == "interaction" else 2 * (signs[:, 0] + signs[:, 1])
    return ids, torch.bernoulli(logit.sigmoid(), generator=generator)


def train_auc(name, kind):
    from sklearn.metrics import roc_auc_score

    torch.manual_seed(5)
    model = build_model(name, num_features=3, dim=8, num_dense=0, options=OPTIONS.get(name, {}))
    table = torch.nn.Embedding(3 * NUM_IDS, model.vector_width(8))
    torch.nn.init.normal_(table.weight, std=0.1)
    first_row = torch.arange(3) * NUM_IDS
    optimizer = torch.optim.Adam([*model.parameters(), *table.parameters()], lr=0.02)
    ids, labels = planted(kind, 4000, seed=1)
    for step in range(120):
        rows = slice(step % 8 * 500, (step % 8 + 1) * 500)
        logits = model(table(ids[rows] + first_row), torch.zeros(500, 0))
        loss = F.binary_cross_entropy_with_logits(logits, labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ids, labels = planted(kind, 2000, seed=2)
    with torch.no_grad():
        logits = model.eval()(table(ids + first_row), torch.zeros(2000, 0))
    return roc_auc_score(labels.numpy(), logits.numpy())


@pytest.mark.parametrize("name", [name for name in MODELS if name != "lr"])
def test_learns_a_planted_interaction(name):
    assert train_auc(name, "interaction") > 0.95


def test_lr_cannot_learn_an_interaction():
    assert 0.45 < train_auc("lr", "interaction") < 0.55


@pytest.mark.parametrize("name", MODELS)
def test_learns_main_effects(name):
    from sklearn.metrics import roc_auc_score

    ids, labels = planted("main", 2000, seed=2)
    signs = 1.0 - 2.0 * (ids % 2)
    best = roc_auc_score(labels.numpy(), (signs[:, 0] + signs[:, 1]).numpy())
    assert best - 0.02 < train_auc(name, "main") < best + 0.01
