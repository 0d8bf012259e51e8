"""Where a run stands between two steps: what observers are told, and what a checkpoint saves of it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Best:
    """The evaluation with the highest valid AUC so far."""

    auc: float
    epoch: int  # counted from 1
    step: int
    samples: int


@dataclass
class Progress:
    """Where a run stands, between two steps."""

    epoch: int = 0  # epochs done
    batch: int = 0  # batches of the open epoch done
    step: int = 0
    samples: int = 0
    evaluated_step: int = 0  # step of the last evaluation during training
    stale: int = 0  # evaluations since the best one
    plateau: float = 1.0  # product of the plateau factors so far
    best: Best | None = None
    train_seconds: float = 0.0
    seconds: float = 0.0
    log_position: int = 0
    train_rows: int = 0  # of the dataset; a resumed run must find as many
    data: str = ""  # fingerprint of the dataset; a resumed run must find the same
    dealt: list[tuple[int, int]] = field(
        default_factory=list
    )  # (first batch, ranks) of the open epoch; none: one process

    def deal_to(self, world: int) -> None:
        """So many ranks go on from here."""
        if self.batch == 0:
            self.dealt = [] if world == 1 else [(0, world)]
        elif (self.dealt or [(0, 1)])[-1][1] != world:
            self.dealt = [*(self.dealt or [(0, 1)]), (self.batch, world)]
