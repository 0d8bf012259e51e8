"""`hotbed train --ray`: the ranks of one run on a Ray cluster, started again after a lost machine from the last checkpoint.

    this process      a placement group, one bundle for each rank; the store through which ranks meet; their output, passed on
    an actor per rank a process of the same command, without --ray, with the variables that torchrun sets

So a rank is what torchrun starts (ranks.py), and a restart resumes as it does there: the run folder and the data lie where all
machines see them, under the same path. Ray chooses the machines; a machine that is lost takes its actors with it, and all ranks
start again where there is room.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple

import typer

from hotbed.cli.console import fail, print_progress
from hotbed.errors import ConfigError, ExitCode, RankError, reason_of
from hotbed.host.extras import connect_ray

_POLL = 0.2  # seconds
_PLACED_WITHIN = 300.0
_LAST_WORDS = 10.0  # seconds for the other ranks to end by themselves once one is lost
_SAVED_WITHIN = 600.0  # after Ctrl-C
_DIE_WITH_PARENT = 1  # of prctl
_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it


class RankProcess:
    """An actor: one rank as a process of its own, which ends when the actor does."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: deque[tuple[int, str]] = deque()  # (1: stdout, 2: stderr; text)
        self._readers: list[threading.Thread] = []

    def place(self) -> tuple[str, list[str]]:
        """The machine, and the GPUs that Ray gave to this rank there."""
        import ray

        gpus = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
        return ray.get_runtime_context().get_node_id(), gpus if ray.get_gpu_ids() else []

    def start(self, arguments: Sequence[str], environment: dict[str, str], folder: str) -> None:
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"{folder} does not exist on {os.uname().nodename}; machines share this folder")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hotbed", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
            cwd=folder,
            preexec_fn=_die_with_parent,  # noqa: PLW1509  one system call, which allocates and locks nothing
        )
        for number, stream in ((1, self._process.stdout), (2, self._process.stderr)):
            reader = threading.Thread(target=self._read, args=(number, stream), daemon=True)
            self._readers.append(reader)
            reader.start()

    def _read(self, number: int, stream: Any) -> None:
        for line in stream:
            self._lines.append((number, line.decode(errors="replace")))

    def poll(self) -> tuple[list[tuple[int, str]], int | None]:
        """What was printed since the last call, and the exit code of a process that has ended and said all."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            for reader in self._readers:
                reader.join(timeout=1.0)
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        return lines, code

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def _die_with_parent() -> None:
    if _prctl is not None:
        _prctl(_DIE_WITH_PARENT, signal.SIGKILL)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which schedulers send before they take a machine away."""


@contextmanager
def _noting_sigterm() -> Iterator[None]:
    """Raise Terminated; Ray's own handler would end this process at once, and all ranks with it."""

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except Terminated:
        raise typer.Exit(fail("terminated", ExitCode.TERMINATED)) from None
    finally:
        signal.signal(signal.SIGTERM, before)


class AttemptEnd(NamedTuple):
    """How all ranks ended; `lost` says why they should start again, if they should."""

    code: int
    lost: str = ""


def train_on_ray(arguments: Sequence[str], num_ranks: int | None, restarts: int, on_gpu: bool | None) -> int:
    """Run the command `hotbed ARGUMENTS` on every rank; its exit code. `on_gpu` None: if the cluster has GPUs."""
    if "WORLD_SIZE" in os.environ:
        raise ConfigError("--ray starts the ranks itself; run it without torchrun.")
    ray = connect_ray()
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0))
    on_gpu = gpus > 0 if on_gpu is None else on_gpu
    machines = sum(node["Alive"] and node["Resources"].get("CPU", 0) >= 1 for node in ray.nodes())
    count = num_ranks or (gpus if on_gpu else machines)
    bundle = {"CPU": 1.0, **({"GPU": 1.0} if on_gpu else {})}
    if count < 1 or any(resources.get(name, 0) < count * need for name, need in bundle.items()):
        has = ", ".join(f"{int(resources.get(name, 0))} {name}" for name in bundle)
        raise ConfigError(
            f"{max(count, 1)} ranks need {max(count, 1)} times {' and '.join(f'1 {name}' for name in bundle)}; the Ray cluster "
            f"has {has} (`ray status`). Give --ranks N, or add machines (`ray start --address ...`)."
        )
    print_progress(f"{count} ranks on a Ray cluster of {machines} machines")
    store, meeting = _meeting_place(ray)
    end = AttemptEnd(1)
    with _noting_sigterm():
        for attempt in range(restarts + 1):
            environment = {**meeting, "TORCHELASTIC_RESTART_COUNT": str(attempt), "WORLD_SIZE": str(count)}
            end = _Attempt(ray, count, bundle).run(without_ray(arguments), environment)
            if not end.lost:
                return end.code
            if attempt < restarts:
                print_progress(
                    f"{end.lost}; all ranks start again from the last checkpoint (restart {attempt + 1} of {restarts})"
                )
    del store  # ranks meet there until now
    raise RankError(
        f"{end.lost}, and the ranks were started again {restarts} times already (--restarts). The run is kept: "
        "hotbed train --ray --resume RUN continues it."
    )


def without_ray(arguments: Sequence[str]) -> list[str]:
    """The command of one rank: the same without --ray and its options."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        name, equals, _ = word.partition("=")
        if name in ("--ranks", "--restarts"):
            if not equals:
                next(words, None)
        elif word != "--ray":
            kept.append(word)
    return kept


def _meeting_place(ray: Any) -> tuple[Any, dict[str, str]]:
    """A store in this process, which outlives restarts, and how ranks find it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host = ray.util.get_node_ip_address()
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_PLACED_WITHIN))
    return store, {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": secrets.token_hex(4),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


class _Attempt:
    """All ranks once, from their placement to their end."""

    def __init__(self, ray: Any, count: int, bundle: dict[str, float]) -> None:
        from ray.util.placement_group import placement_group

        self._ray, self._count, self._bundle = ray, count, bundle
        self._group = placement_group([bundle] * count, strategy="PACK")
        self._actors: list[Any] = []
        self._codes: dict[int, int] = {}
        self._lost: dict[int, str] = {}  # rank -> why

    def run(self, arguments: Sequence[str], environment: dict[str, str]) -> AttemptEnd:
        from ray.exceptions import RayError

        try:
            self._place()
            try:
                self._start(arguments, environment)
            except RayError as error:
                return AttemptEnd(
                    1, f"a rank could not be started ({reason_of(getattr(error, 'cause', None) or error)})"
                )
            return self._follow()
        finally:
            self._remove()

    def _place(self) -> None:
        from ray.exceptions import GetTimeoutError
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        try:
            self._ray.get(self._group.ready(), timeout=_PLACED_WITHIN)
        except GetTimeoutError:
            raise RankError(
                f"the Ray cluster had no room for {self._count} ranks of {self._bundle} within {_PLACED_WITHIN:.0f} s "
                "(`ray status`). Give a smaller --ranks, or add machines."
            ) from None
        remote = self._ray.remote(max_restarts=0)(RankProcess)
        for number in range(self._count):
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
            self._actors.append(
                remote.options(
                    num_cpus=self._bundle["CPU"], num_gpus=self._bundle.get("GPU", 0), scheduling_strategy=where
                ).remote()
            )

    def _start(self, arguments: Sequence[str], environment: dict[str, str]) -> None:
        """Ranks of one machine have numbers that follow each other; all of them see the GPUs of all of them."""
        places = self._ray.get([actor.place.remote() for actor in self._actors], timeout=_PLACED_WITHIN)
        order = sorted(range(self._count), key=lambda number: (places[number][0], number))
        self._actors = [self._actors[number] for number in order]
        places = [places[number] for number in order]
        started = []
        for rank, (actor, (machine, _)) in enumerate(zip(self._actors, places)):
            of_machine = [number for number, place in enumerate(places) if place[0] == machine]
            gpus = [gpu for number in of_machine for gpu in places[number][1]]
            own = {
                "RANK": str(rank),
                "LOCAL_RANK": str(of_machine.index(rank)),
                "LOCAL_WORLD_SIZE": str(len(of_machine)),
                **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
            }
            started.append(actor.start.remote(list(arguments), {**environment, **own}, os.getcwd()))
        self._ray.get(started, timeout=_PLACED_WITHIN)

    def _follow(self) -> AttemptEnd:
        """Pass on what ranks print until all have ended, or one is lost."""
        until = float("inf")
        stopped: ExitCode | None = None
        while len(self._codes) + len(self._lost) < self._count and time.monotonic() < until:
            try:
                self._poll()
                time.sleep(_POLL)
            except KeyboardInterrupt as error:
                if stopped is not None:
                    raise
                is_term = isinstance(error, Terminated)
                stopped, until = (
                    ExitCode.TERMINATED if is_term else ExitCode.INTERRUPTED,
                    time.monotonic() + _SAVED_WITHIN,
                )
                for actor in self._actors:
                    actor.signal.remote(signal.SIGTERM if is_term else signal.SIGINT)
            if stopped is None and until == float("inf") and (self._lost or any(self._codes.values())):
                until = time.monotonic() + _LAST_WORDS
        return self._end(stopped)

    def _poll(self) -> None:
        from ray.exceptions import RayError

        for rank, actor in enumerate(self._actors):
            if rank in self._codes or rank in self._lost:
                continue
            try:
                lines, code = self._ray.get(actor.poll.remote(), timeout=60.0)
            except RayError as error:
                self._lost[rank] = f"rank {rank} was lost with its machine ({type(error).__name__})"
                continue
            for number, line in lines:
                stream = sys.stdout if number == 1 else sys.stderr
                stream.write(line)
                stream.flush()
            if code is not None:
                self._codes[rank] = code

    def _end(self, stopped: ExitCode | None) -> AttemptEnd:
        killed = [rank for rank, code in self._codes.items() if code < 0]
        failed = [rank for rank, code in self._codes.items() if code == 1]
        worst = max((abs(code) for code in self._codes.values()), default=1)
        if stopped is not None:
            return AttemptEnd(stopped)
        if self._lost:
            return AttemptEnd(1, next(iter(self._lost.values())))
        if killed:
            return AttemptEnd(1, f"rank {killed[0]} was ended by signal {-self._codes[killed[0]]}")
        if failed:
            return AttemptEnd(1, f"rank {failed[0]} failed")
        return AttemptEnd(worst)

    def _remove(self) -> None:
        from ray.util.placement_group import remove_placement_group

        for actor in self._actors:
            self._ray.kill(actor)
        remove_placement_group(self._group)
