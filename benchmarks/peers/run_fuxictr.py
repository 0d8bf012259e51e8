"""FuxiCTR as its users run it: a model made of its layers, `fit` of its BaseModel, its loader over .npz (its fastest format).

The wheel has the layers, the loop and the loaders; models are put together from them, as its tutorial does. `eval_step` is
the place where its loop evaluates.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from fuxictr.features import FeatureMap  # type: ignore[import-not-found, unused-ignore]
from fuxictr.pytorch.dataloaders import RankDataLoader  # type: ignore[import-not-found, unused-ignore]
from fuxictr.pytorch.layers import (  # type: ignore[import-not-found, unused-ignore]
    CrossNetV2,
    FactorizationMachine,
    FeatureEmbedding,
    MLP_Block,
)
from fuxictr.pytorch.models import BaseModel  # type: ignore[import-not-found, unused-ignore]
from fuxictr.pytorch.torch_utils import seed_everything  # type: ignore[import-not-found, unused-ignore]

from benchmarks.peers.job import Clock, Job


class PeerModel(BaseModel):  # type: ignore[misc, unused-ignore]
    """Evaluates by the benchmark's clock; nothing else of the loop is touched."""

    def __init__(self, features: Any, job: Job, clock: Clock) -> None:
        super().__init__(
            features,
            model_id=job.model,
            eval_steps=job.eval_every,
            verbose=0,
            model_root=str(clock.folder),
            metrics=["AUC"],
        )
        self.clock = clock
        init = f"partial(nn.init.normal_, std={job.init_std})"
        self.embedding = FeatureEmbedding(features, job.dim, embedding_initializer=init)
        width = job.dim * len(job.rows)
        deep = {"hidden_units": job.hidden, "dropout_rates": job.dropout, "batch_norm": job.batch_norm}
        self.kind = job.model
        self.mlp = MLP_Block(width, output_dim=None if job.model == "dcnv2" else 1, **deep)
        if job.model == "deepfm":
            self.pairs = FactorizationMachine(features)
        elif job.model == "dcnv2":
            self.cross = CrossNetV2(width, job.num_cross)
            self.out = torch.nn.Linear(width + job.hidden[-1], 1)
        self.compile("adam", "binary_crossentropy", job.lr)
        self.reset_parameters()
        self.model_to_device()

    def forward(self, inputs: Any) -> dict[str, torch.Tensor]:
        ids = self.get_inputs(inputs)
        vectors = self.embedding(ids)
        flat = vectors.flatten(start_dim=1)
        logits = self.mlp(flat)
        if self.kind == "deepfm":
            logits = logits + self.pairs(ids, vectors)
        elif self.kind == "dcnv2":
            logits = self.out(torch.cat([self.cross(flat), logits], dim=1))
        return {"y_pred": self.output_activation(logits)}

    def eval_step(self) -> None:
        self.clock.stop()
        self.clock.point(self._total_steps, self.predict(self.valid_gen))
        self.save_weights(self.checkpoint)  # which fit reads at its end
        self.train()
        self.clock.go()


def feature_map(job: Job) -> Any:
    """What FuxiCTR knows of the columns; made in memory, as its own `load` would make it."""
    features = FeatureMap("peers", job.data)
    features.labels = ["label"]
    features.num_fields = len(job.rows)
    features.total_features = sum(job.rows.values())
    features.default_emb_dim = job.dim
    for name, rows in job.rows.items():
        features.features[name] = {"source": "", "type": "categorical", "vocab_size": rows}
    features.set_column_index()
    return features


def main() -> None:
    folder = Path(sys.argv[1])
    job, clock = Job.load(folder), Clock(folder)
    torch.set_num_threads(job.threads)
    seed_everything(job.seed)
    features = feature_map(job)
    model = PeerModel(features, job, clock)
    os.makedirs(model.model_dir, exist_ok=True)
    splits = {f"{split}_data": str(Path(job.data) / f"{split}.npz") for split in ("train", "valid")}
    clock.go()
    train, valid = RankDataLoader(features, stage="train", batch_size=job.batch_size, shuffle=True, **splits)
    model.fit(train, epochs=job.epochs, validation_data=valid)
    clock.stop()
    clock.done({"torch": torch.__version__})


if __name__ == "__main__":
    main()
