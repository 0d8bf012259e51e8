"""Score with a trained model whose tables may be larger than memory: `hotbed.load` (docs/serve.md)."""

from __future__ import annotations

from hotbed.scorer.live import ScoredBatch
from hotbed.scorer.scorer import DEFAULT_MEMORY, Scorer, load

__all__ = ["DEFAULT_MEMORY", "ScoredBatch", "Scorer", "load"]
