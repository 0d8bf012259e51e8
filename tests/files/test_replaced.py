"""A folder of a store that is replaced while it is copied: a copy of one version, or a refusal."""

import json
import shutil
import zlib

import pytest

from hotbed.files import copies, path_of
from hotbed.files.copies import publish_folder
from hotbed.files.store import FileStat, ReplacedError
from hotbed.run import remote_folder
from hotbed.run.remote_folder import content_of, local_copy, refresh
from hotbed.run.remote_run import bring_run, working_folder

ROWS, DENSE, LINKED = "rows/a.safetensors", "dense.safetensors", "frozen/a/1.seg"


def write_version(folder, number, linked=False):
    """A folder whose files say their version; all versions have files of the same sizes."""
    shutil.rmtree(folder, ignore_errors=True)
    names = [ROWS, DENSE, LINKED] if linked else [ROWS, DENSE]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} of version {number}")
    marks = {name: [len(content), zlib.crc32(content)] for name in names if (content := (folder / name).read_bytes())}
    if linked:
        sizes = {LINKED: marks.pop(LINKED)[0]}
        body = {"files": marks, "linked": sizes, "parent": None, "time": 1700000000.0 + number}
    tree = {"checkpoint": body} if linked else marks
    (folder / "manifest.json").write_text(json.dumps(tree).ljust(400))
    return folder


def versions_in(folder):
    return {path.read_text()[-1] for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"}


def in_order(local, remote):
    publish_folder(local, remote, "manifest.json")


def by_another_tool(local, remote):
    """As a copy of files in the order of their names does it, and only some of them have arrived so far."""
    (remote / DENSE).put(local / DENSE)


@pytest.fixture
def replacing(monkeypatch):
    """After each of the next `count` files that are fetched, something happens."""

    def replace(count, happens):
        left, real = [count], copies.fetch_file

        def fetch(remote, local, stat):
            real(remote, local, stat)
            if left[0] and remote.name != "manifest.json":
                left[0] -= 1
                happens()

        monkeypatch.setattr(copies, "AT_ONCE", 1)
        monkeypatch.setattr(copies, "fetch_file", fetch)

    return replace


@pytest.mark.parametrize("linked", [False, True])
def test_a_copy_is_of_one_version(bucket, tmp_path, replacing, linked):
    in_order(write_version(tmp_path / "one", 1, linked), bucket / "export")
    new = write_version(tmp_path / "two", 2, linked)
    replacing(1, lambda: in_order(new, bucket / "export"))
    assert versions_in(local_copy(bucket / "export")) == {"2"}


def test_half_a_version_is_refused(bucket, tmp_path, replacing):
    in_order(write_version(tmp_path / "one", 1), bucket / "export")
    new = write_version(tmp_path / "two", 2)
    replacing(100, lambda: by_another_tool(new, bucket / "export"))
    (bucket / "export" / DENSE).put(new / DENSE)
    with pytest.raises(ReplacedError, match=r"dense\.safetensors does not match the checksum"):
        local_copy(bucket / "export")
    in_order(new, bucket / "export")
    assert versions_in(local_copy(bucket / "export")) == {"2"}


def test_one_that_is_replaced_all_the_time_is_refused(bucket, tmp_path, replacing):
    in_order(write_version(tmp_path / "one", 1), bucket / "export")
    local = local_copy(bucket / "export")
    in_order(write_version(tmp_path / "one", 2), bucket / "export")
    numbers = iter(range(3, 1000))
    replacing(1000, lambda: in_order(write_version(tmp_path / "one", next(numbers) % 10), bucket / "export"))
    with pytest.raises(ReplacedError, match=r"was replaced while it was copied|when it was opened"):
        refresh(local)
    assert versions_in(local) == {"1"}  # the server keeps what it has


def test_one_that_goes_while_it_is_copied(bucket, tmp_path, replacing):
    """A checkpoint is pruned in the store: the copy has the others."""
    for step in (8, 16):
        in_order(write_version(tmp_path / "one", 1), bucket / "run" / "checkpoints" / f"{step:012}")

    def prune():
        copies.remove_remote(bucket / "run" / "checkpoints" / f"{8:012}", "manifest.json")

    replacing(1, prune)
    local = local_copy(bucket / "run")
    assert [path.name for path in (local / "checkpoints").iterdir()] == [f"{16:012}"]


def test_replaced_within_a_second(bucket, tmp_path, monkeypatch):
    """Sizes are the same, and so is the time, which stores give in seconds."""
    monkeypatch.setattr("hotbed.files.store._stat", lambda info: FileStat(info.size, 1_700_000_000 * 10**9))
    local = None
    for number in range(1, 6):
        in_order(write_version(tmp_path / "one", number), bucket / "export")
        if local is None:
            local = local_copy(bucket / "export")
        else:
            refresh(local)
        assert versions_in(local) == {str(number)}


def test_a_run_is_resumed_from_one_version(bucket, tmp_path, replacing):
    name = f"checkpoints/{8:012}"
    (bucket / "run" / "config.json").write_text("{}")
    in_order(write_version(tmp_path / "one", 1, linked=True), bucket / "run" / name)
    new = write_version(tmp_path / "two", 2, linked=True)
    replacing(1, lambda: in_order(new, bucket / "run" / name))
    with pytest.raises(ReplacedError):
        bring_run(bucket / "run", working_folder(bucket / "run"))
    assert not (working_folder(bucket / "run") / name).exists()
    assert list(content_of(bucket / "run").units) == [name]
    bring_run(bucket / "run", working_folder(bucket / "run"))
    assert versions_in(working_folder(bucket / "run") / name) == {"2"}


def steps_in(folder):
    return sorted(int(path.name) for path in folder.glob("0*") if (path / "manifest.json").is_file())


@pytest.mark.parametrize("run", ["run", "checkpoints/run"])
def test_a_folder_of_checkpoints_is_brought_up_to_date(bucket, tmp_path, run):
    """A server of it looks for newer ones, and copies nothing of the runs next to it."""
    for place, step in ((run, 8), ("other", 8), (run, 16)):
        in_order(write_version(tmp_path / "one", 1), bucket / place / "checkpoints" / f"{step:012}")
        if place == "other":
            local = local_copy(bucket / run / "checkpoints")
            assert steps_in(local) == [8]
            assert {path.name for path in local.parent.iterdir()} == {"checkpoints"}
    refresh(local)
    assert steps_in(local) == [8, 16]
    assert local_copy(bucket / run).joinpath("checkpoints") == local
    assert local_copy(bucket / run / "checkpoints" / f"{8:012}") == local / f"{8:012}"


def test_names_that_look_like_checkpoints():
    for text in ("s3://checkpoints/run", "s3://checkpoints", "s3://bucket/checkpoints/000000000008.new/model"):
        assert remote_folder._run_of(path_of(text)) == (path_of(text), "")
    rank = "checkpoints/rank-0-of-2/000000000008"
    assert remote_folder._run_of(path_of(f"s3://bucket/{rank}")) == (path_of("s3://bucket"), rank)


def test_what_a_killed_process_brought_goes_when_it_goes_in_the_store(bucket, tmp_path, monkeypatch):
    """A model that was given up must not be scored because nobody remembers where it is from."""
    in_order(write_version(tmp_path / "one", 1), bucket / "run" / "checkpoints" / f"{8:012}")
    in_order(write_version(tmp_path / "two", 2), bucket / "run" / "model")
    real = remote_folder.fetch_unit

    def killed(remote, local, unit):
        real(remote, local, unit)
        if local.name == "model":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(remote_folder, "fetch_unit", killed)
        with pytest.raises(KeyboardInterrupt):
            local_copy(bucket / "run")
    copies.remove_remote(bucket / "run" / "model", "manifest.json")
    assert [path.name for path in local_copy(bucket / "run").iterdir()] == ["checkpoints"]
