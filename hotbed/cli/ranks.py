"""The processes of one torchrun: how they connect, how an error on one ends all, and how a restart resumes.

    with joined() as ranks:
        world = ranks.connect(device, timeout)

With a single process all of this does nothing. Only the rank with the error reports it in full; the others say in one line
which rank they stop for, and nothing if they have the same error, such as a wrong setting. A process that has lost other ranks
exits at once, whatever its threads are waiting for, so that torchrun can restart all of them.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from hotbed.cli.console import fail
from hotbed.errors import HotbedError, RankError, exit_code_of

if TYPE_CHECKING:
    from hotbed.host.threads import CoreShare
    from hotbed.host.topology import Placement
    from hotbed.parallel.world import Heartbeat, World

_STARTING = 300.0  # seconds for which ranks wait for each other until the settings say how long
_AFTER = 1.2, 30.0  # torch's own timeout is later: it cannot say which rank is missing
_WAIT_FOR_REASON = 0.5  # seconds for another rank to say why it broke the connection


class RunStart(NamedTuple):
    """The folder of a run, and whether it is resumed or overwritten."""

    run: Path
    resume: bool = False
    overwrite: bool = False
    repeats: bool = False  # a job that may have ended already


class TorchrunRanks:
    """This process among those that torchrun started."""

    def __init__(self) -> None:
        self.size, self.rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.pulse: Heartbeat | None = None
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))  # 0: who started the ranks did not say
        self.cores: CoreShare | None = None  # if this process uses more than torchrun's one thread
        self.placement: Placement | None = None  # of the ranks of this machine
        self._store: Any = None
        self._lasting: Any = None  # outlives a restart
        if self.size > 1:
            self._meet()
        elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # one process that torchrun restarts
            self._lasting = _lasting_store(timedelta(seconds=_STARTING))

    def _meet(self) -> None:
        from torch.distributed.distributed_c10d import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        from hotbed.parallel.world import Heartbeat

        wait = timedelta(seconds=_STARTING)
        met, _, _ = next(rendezvous("env://", timeout=wait))
        self._store = PrefixStore(
            f"hotbed-attempt-{self.attempt}", met
        )  # torchrun's store still holds keys of the previous attempt
        self._lasting = _lasting_store(wait)
        self.pulse = Heartbeat(PrefixStore(str(self.attempt), self._lasting), self.rank, self.size, _STARTING)

    def connect(self, device: str, timeout: float, bind: bool | str = False) -> World:
        """Create the process groups and take this rank's share of the machine; `device` and `bind` as in the settings."""
        from hotbed.parallel.world import ALONE, World

        if self.pulse is None:
            return ALONE
        import torch
        import torch.distributed as dist

        self.pulse.timeout = timeout
        self.pulse.enter("connecting")
        on_cuda = device == "cuda" or (
            device == "auto" and torch.cuda.is_available()
        )  # cuda:0 is shared, NCCL refuses that
        if on_cuda:
            torch.cuda.set_device(self.local_rank)
        latest = timedelta(seconds=timeout * _AFTER[0] + _AFTER[1])
        backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
        dist.init_process_group(backend, store=self._store, rank=self.rank, world_size=self.size, timeout=latest)
        world = World(self.rank, self.size, dist.new_group(backend="gloo", timeout=latest), self.pulse)
        self._settle(world, device if device.startswith("cuda:") else "cuda" if on_cuda else "cpu", bind)
        return world

    def _settle(self, world: World, device: str, bind: bool | str) -> None:
        """Take cores, memory and threads; all ranks do so together, because one that was given others changes the choice."""
        from hotbed.host.threads import share_cores
        from hotbed.host.topology import bind_process, find_gpus, find_machine, given_cores, place_ranks

        node = os.environ.get("GROUP_RANK", "0")
        given = world.gather((node, given_cores()))
        if not self.local_size:
            self.cores = share_cores()
            return
        number = int(device[5:]) if device.startswith("cuda:") else None
        gpus = [rank if number is None else number for rank in range(self.local_size)] if device != "cpu" else None
        is_apart = len({cores for at, cores in given if at == node}) > 1
        machine = find_machine(find_gpus() if gpus is not None else ())
        placement = place_ranks(machine, self.local_size, gpus=gpus, bind=bind, given_apart=is_apart)
        place = placement.ranks[self.local_rank]
        self.cores = share_cores(place.threads)
        refused = bind_process(place) if placement.bound else ""
        said = [f"; rank {rank}: {text}" for rank, text in enumerate(world.gather(refused)) if text]
        self.placement = placement._replace(why=placement.why + "".join(said))

    @property
    def run(self) -> str:
        """The run folder that an earlier attempt chose; empty if there was none."""
        return self._noted("run")

    @run.setter
    def run(self, folder: str) -> None:
        if self._lasting is not None:
            self._lasting.set("run", folder)

    def begin(self, run: Path) -> None:
        """Record that the folder holds this run, so that a restart may continue it."""
        if self._lasting is not None:
            self._lasting.set("begun", str(run))

    def has_begun(self, run: Path) -> bool:
        """Whether an earlier attempt started or resumed the run in this folder."""
        return self._noted("begun") == str(run)

    def start(self, requested: RunStart | None, fresh: Path) -> RunStart:
        """The requested folder, else a new one; a run that an earlier attempt started is continued.

        A folder that an earlier attempt was refused is refused again: it may belong to somebody else.
        """
        from hotbed.run.folder import check_free
        from hotbed.train.checkpoint import has_checkpoint

        start = requested or RunStart(Path(self.run) if self.run else fresh)
        if self.has_begun(start.run) and start.run.is_dir():
            start = RunStart(start.run, resume=has_checkpoint(start.run), overwrite=not has_checkpoint(start.run))
        if not start.resume:
            check_free(start.run, start.overwrite)
        self.run = str(start.run)
        return start

    def _noted(self, what: str) -> str:
        known = self._lasting is not None and self.attempt and self._lasting.check([what])
        return str(self._lasting.get(what).decode()) if known else ""

    def part(self) -> None:
        """End normally, together with all ranks."""
        import torch.distributed as dist

        if self.pulse is not None:
            self.pulse.enter("ending")
            if dist.is_initialized():
                dist.barrier()
                dist.destroy_process_group()
            self.pulse.end()

    def fail(self, error: BaseException) -> None:
        """Report the error of this rank and end the process."""
        from hotbed.parallel.world import following, leave

        assert self.pulse is not None
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to all ranks as soon as one is lost
        known = isinstance(error, HotbedError)
        text = str(error) if known else "".join(traceback.format_exception(error))
        if isinstance(error, KeyboardInterrupt):
            text, known = "interrupted", True
        elif _is_echo(error):
            first = self.pulse.failure(_WAIT_FOR_REASON)
            if first is not None and first.rank != self.rank:
                leave(following(self.rank, first))
            if not known:
                text = f"the connection to other ranks was lost in the stage {self.pulse.stage!r}: {self.pulse.diagnosis()}."
                known = True
        try:
            first = self.pulse.fail(text if known else f"{type(error).__name__}: {error}\n{text}")
            silent = first.rank != self.rank and first.text == text
        except RuntimeError:  # the process that hosts the store is gone
            silent = False
        code = exit_code_of(error)
        if not silent:
            fail(f"rank {self.rank}: {text}", code)
        leave("", code)


def _lasting_store(wait: timedelta) -> Any:
    """A store that outlives a restart: it carries notes from one attempt to the next."""
    from torch.distributed.distributed_c10d import PrefixStore

    return PrefixStore(f"hotbed/{os.environ.get('TORCHELASTIC_RUN_ID', '')}", own_store(wait))


def own_store(wait: timedelta) -> Any:
    """A separate connection to torchrun's store: a call that waits for an answer blocks its connection."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=wait)


@contextmanager
def join_ranks() -> Iterator[TorchrunRanks]:
    """A context for everything that the ranks of a run do together."""
    ranks = TorchrunRanks()
    if ranks.size == 1:
        yield ranks
        return
    try:
        yield ranks
    except typer.Exit:
        ranks.part()
        raise
    except BaseException as error:
        ranks.fail(error)
    ranks.part()


def _is_echo(error: BaseException) -> bool:
    """Whether the error was caused by another rank: a RankError, or a broken connection."""
    import torch.distributed as dist

    if isinstance(error, RankError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "Connection"))


Start, Ranks, joined = RunStart, TorchrunRanks, join_ranks  # names of 0.1
