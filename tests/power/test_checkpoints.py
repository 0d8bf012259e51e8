"""Power is lost while checkpoints are saved or removed: the newest is the one before or the new one, whole."""

from contextlib import suppress

from hotbed.checkpoint import Policy, Saver
from hotbed.checkpoint.chain import Entry, chain_of, find, folders_in, locked, remove, unneeded
from hotbed.checkpoint.layouts import newest_in, ranks_in, remove_others, root_of, worlds_in
from hotbed.checkpoint.manifest import read_manifest
from hotbed.checkpoint.read import load_rows, problems_of
from hotbed.host import atomic
from hotbed.store.history import begin_history
from tests.checkpoint.fakes import DictTables, state
from tests.power.record import Recorder
from tests.power.replay import replay

POLICY = Policy(full_every=3, keep=2)


class Training:
    """Tables that change from step to step, and what they held at each."""

    def __init__(self, folder, policy=POLICY):
        self.root = folder / "run" / "checkpoints"
        self.tables = DictTables()
        self.saver = Saver(self.root, self.tables, policy)
        self.held, self.continued, self.problems = {}, set(), {}
        self.tables.write("user", *range(100, 180))  # so that what a step changes is little

    def save(self, step):
        self.tables.write("user", *range(step, step + 5))
        self.tables.write("ad", step)
        self.tables.forget("user", step)
        self.saver.save(state(step), wait=True)
        held = DictTables()
        load_rows(find(self.root), held.restore())
        assert held.same_as(self.tables)
        self.held[step] = held

    def verified(self, folder):
        """What is wrong with a checkpoint, read once for all states that hold the same bytes of it and of its chain."""
        chain = [entry.folder for entry in chain_of(Entry(folder, read_manifest(folder)))]
        files = [path for one in chain for path in sorted(one.rglob("*")) if path.is_file()]
        content = tuple((str(path.relative_to(folder.parent)), path.read_bytes()) for path in files)
        if content not in self.problems:
            self.problems[content] = problems_of(folder)
            if not self.problems[content]:
                entry, held = find(folder), DictTables()
                load_rows(entry, held.restore())
                assert held.same_as(self.held[entry.manifest.step])
        return self.problems[content]

    def found(self, folder):
        """The step of the newest checkpoint; every one must be whole, and a further one must find its place."""
        root = folder / "run" / "checkpoints"
        for one in folders_in(root):
            assert self.verified(one) == []
        if not folders_in(root):
            return "none"
        newest = find(root)
        if (names := frozenset(path.name for path in root.iterdir())) not in self.continued:
            self.continued.add(names)
            held = DictTables()
            load_rows(newest, held.restore())
            assert held.same_as(self.held[newest.manifest.step])
            held.write("user", 1)
            Saver(root, held).save(state(99), wait=True)
            assert find(root).manifest.step == 99
            assert {path.suffix for path in root.iterdir()} == {""}
        return f"step {newest.manifest.step}"


def test_the_first_checkpoint_of_a_run(disk, room):
    training = Training(disk)
    with Recorder(disk) as recorder:
        training.save(1)
        recorder.mark("step 1")
    replay(
        "checkpoint: first, in a new folder",
        recorder,
        room,
        training.found,
        lambda said: {"step 1"} if said else {"none", "step 1"},
    )


def test_incremental_checkpoints_and_the_removal_of_old_ones(disk, room):
    """full, incremental, incremental, full, incremental; two are kept, with what they need."""
    training = Training(disk)
    training.save(1)
    with Recorder(disk) as recorder:
        for step in (2, 3, 4, 5):
            training.save(step)
            recorder.mark(f"step {step}")
    assert [one.name for one in folders_in(training.root)] == ["000000000004", "000000000005"]

    def allowed(said):
        last = int(said[-1].split()[1]) if said else 1
        return {f"step {last}"} | ({f"step {last + 1}"} if last < 5 else set())

    replay("checkpoint: incremental, removing old ones", recorder, room, training.found, allowed)


def test_prune(disk, room):
    """A chain of three and a full one; one is kept."""
    training = Training(disk, Policy(full_every=3, keep=9))
    for step in (1, 2, 3, 4):
        training.save(step)
    with Recorder(disk) as recorder, locked(training.root):
        remove(unneeded(training.root, keep=1))
    assert len(folders_in(training.root)) == 1
    replay("checkpoint: prune", recorder, room, training.found, lambda _: {"step 4"})


def test_what_a_removal_cut_short_has_left_is_cleaned(disk, room, monkeypatch):
    """It was renamed, and neither flushed nor deleted; the process lives on and saves the next one."""

    def interrupt(_):
        raise KeyboardInterrupt

    training = Training(disk)
    for step in (1, 2, 3):
        training.save(step)
    with Recorder(disk) as recorder:
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(atomic, "flush_to_disk", interrupt)
            remove([find(training.root).folder])
        begin_history(training.tables)
        training.save(4)
        recorder.mark("step 4")
    allowed = {"step 2", "step 3", "step 4"}
    replay(
        "checkpoint: a removal cut short",
        recorder,
        room,
        training.found,
        lambda said: {"step 4"} if said else allowed,
    )


def test_checkpoints_of_another_number_of_ranks_are_removed(disk, room):
    """Two ranks have served and one process went on."""
    ranks, alone = [Training(disk), Training(disk)], Training(disk)
    for rank, one in enumerate(ranks):
        one.saver = Saver(root_of(one.root, rank, 2), one.tables)
        for step in (1, 2):
            one.tables.write("user", step)
            one.saver.save(state(step), wait=True)
    alone.save(3)
    with Recorder(disk) as recorder:
        remove_others(alone.root, 1)
    assert worlds_in(alone.root) == [1]

    def found(left):
        root = left / "run" / "checkpoints"
        for one in [root, *ranks_in(root)]:
            for folder in folders_in(one):
                assert problems_of(folder) == []
        return f"step {newest_in(root).step}"

    replay("checkpoint: of another number of ranks", recorder, room, found, lambda _: {"step 3"})
