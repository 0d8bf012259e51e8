"""DeepCTR-Torch as its users run it: `model.fit` on arrays in memory, without metrics on the train split (its fastest way).

Its loss is a sum over the batch; Adam does not see the factor. Its weights of the MLP are drawn with the deviation of the rows;
it gets 0.01, with which it learned faster than with its default of 0.0001.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepctr_torch.inputs import SparseFeat  # type: ignore[import-not-found, unused-ignore]
from deepctr_torch.models import DCN, DeepFM  # type: ignore[import-not-found, unused-ignore]

from benchmarks.peers.job import Clock, Job


def build(job: Job) -> Any:
    """The model of the job, without any L2."""
    columns = [SparseFeat(name, rows, embedding_dim=job.dim) for name, rows in job.rows.items()]
    common = {
        "dnn_hidden_units": tuple(job.hidden),
        "dnn_dropout": job.dropout,
        "dnn_use_bn": job.batch_norm,
        "l2_reg_linear": 0,
        "l2_reg_embedding": 0,
        "init_std": max(job.init_std, 0.01),
        "seed": job.seed,
    }
    if job.model == "deepfm":
        return DeepFM(columns, columns, **common)
    if job.model == "dnn":
        return DeepFM([], columns, use_fm=False, **common)
    return DCN([], columns, cross_num=job.num_cross, cross_parameterization="matrix", l2_reg_cross=0, **common)


def main() -> None:
    folder = Path(sys.argv[1])
    job, clock = Job.load(folder), Clock(folder)
    torch.set_num_threads(job.threads)
    model = build(job)
    model.compile(torch.optim.Adam(model.parameters(), lr=job.lr), "binary_crossentropy")
    valid = job.columns("valid")
    valid.pop("label")
    steps = 0

    def after_step(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps % job.eval_every == 0:
            clock.stop()
            clock.point(steps, model.predict(valid, batch_size=4096))
            model.train()
            clock.go()

    model.optim.register_step_post_hook(after_step)
    clock.go()
    train = job.columns("train")
    labels = train.pop("label").astype(np.float32)
    model.fit(train, labels, batch_size=job.batch_size, epochs=job.epochs, verbose=0, shuffle=True)
    clock.stop()
    clock.done({"torch": torch.__version__})


if __name__ == "__main__":
    main()
