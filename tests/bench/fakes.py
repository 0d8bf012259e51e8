"""Systems whose behaviour a test chooses."""

from __future__ import annotations

import torch

from hotbed.cache import CacheCounts


class FakeSystem:
    """Plain SGD over dense tables; `wrong` says how it misbehaves."""

    def __init__(self, setting, wrong=""):
        generator = torch.Generator().manual_seed(3)
        self.rule = "sgd"
        self.wrong = wrong
        self.tables = [torch.randn(n, setting.dim, generator=generator) for n in setting.rows]
        self.steps = 0
        self.is_closed = False

    def vectors(self, workload):
        try:
            for ids in workload.batches:
                yield self._step(ids)
        finally:
            self.is_closed = True

    def _step(self, ids):
        self.steps += 1
        if self.wrong == "raises" and self.steps > 2:
            raise RuntimeError("out of luck\nsecond line")
        columns = ids.t() if self.wrong != "neighbours" else (ids.t() ^ 1).clamp(max=2)
        out = torch.stack([table[one] for table, one in zip(self.tables, columns)], dim=1)
        if self.wrong == "nan":
            out[0, 0, 0] = torch.nan
        out.requires_grad_()
        out.register_hook(lambda grad: self._update(ids, grad))
        return out

    def _update(self, ids, grad):
        lr = 0.0101 if self.wrong == "rate" else 0.01
        for i, table in enumerate(self.tables):
            if self.wrong == "drops duplicates":
                table[ids[:, i]] -= lr * grad[:, i]
            else:
                table.index_add_(0, ids[:, i], grad[:, i], alpha=-lr)

    def weights(self):
        return [table.clone() for table in self.tables]

    def tier_counts(self):
        return None

    def close(self):
        pass

    def counts(self):
        if self.wrong != "counts":
            return None
        return CacheCounts(hits=10 * self.steps, misses=3 * self.steps, stall_seconds=0.1 * self.steps)
