import errno
import json
import os
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from hotbed.checkpoint import files
from hotbed.errors import RunError
from hotbed.run.folder import check_folder, read_tensors, recover_folder, write_folder, write_tensors, write_text

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
]


@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.booleans()), max_size=6
    )
)
@settings(max_examples=50)
def test_safetensors_gives_back_what_was_written(tmp_path_factory, shapes):
    path = tmp_path_factory.mktemp("tensors") / "some.safetensors"
    tensors = {}
    for number, (dtype, shape, strided) in enumerate(shapes):
        tensor = (torch.arange(2 * int(torch.tensor(shape).prod())) % 2).to(dtype).reshape(*shape, 2)
        tensors[f"t{number}"] = tensor[..., 0] if strided else tensor
    write_tensors(path, tensors)
    for found in (load_file(path), read_tensors(path)):
        assert set(found) == set(tensors)
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)


def test_a_strided_table_is_written_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_PIECE", 64)
    records = torch.randn(101, 24)
    write_tensors(tmp_path / "t", {"weight": records[:, :17], "wide": torch.randn(3, 1000)})
    assert torch.equal(read_tensors(tmp_path / "t")["weight"], records[:, :17])


@pytest.mark.parametrize("content", [b"", b"junk", b"\xff" * 100])
def test_a_broken_tensor_file_is_reported(tmp_path, content):
    path = tmp_path / "t.safetensors"
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"t\.safetensors cannot be read"):
        read_tensors(path)


def fill_with(text):
    def fill(folder):
        (folder / "inner").mkdir()
        (folder / "inner" / "a.txt").write_text(text)
        (folder / "b.txt").write_text("b")

    return fill


def test_a_folder_is_replaced_whole(tmp_path):
    folder = tmp_path / "x"
    write_folder(folder, fill_with("one"))
    check_folder(folder)
    write_folder(folder, fill_with("two"))
    check_folder(folder)
    assert (folder / "inner" / "a.txt").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_the_old_folder_survives_a_failed_write(tmp_path):
    folder = tmp_path / "x"
    write_folder(folder, fill_with("one"))

    def fill(new):
        (new / "half.txt").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(RunError, match=r"cannot write .*x: No space left on device"):
        write_folder(folder, fill)
    check_folder(folder)
    assert (folder / "inner" / "a.txt").read_text() == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("renames", [0, 1])
def test_a_crash_at_any_rename_leaves_a_whole_folder(tmp_path, monkeypatch, renames):
    folder = tmp_path / "x"
    write_folder(folder, fill_with("one"))
    real, done = os.replace, []

    def crash(source, target):
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(source)
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("hotbed.host.atomic.exchange", lambda *_: False)  # a file system that needs two renames
        patch.setattr(os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            write_folder(folder, fill_with("two"))
    recover_folder(folder)
    check_folder(folder)
    assert (folder / "inner" / "a.txt").read_text() == "one"
    write_folder(folder, fill_with("three"))
    assert (folder / "inner" / "a.txt").read_text() == "three"


def test_a_crash_while_the_old_folder_is_removed_is_no_obstacle(tmp_path, monkeypatch):
    folder = tmp_path / "x"
    write_folder(folder, fill_with("one"))
    real = shutil.rmtree

    def crash(path, **options):
        if path.exists() and (path / "manifest.json").exists():
            (path / "manifest.json").unlink()
            raise KeyboardInterrupt
        real(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", crash)
        with pytest.raises(KeyboardInterrupt):
            write_folder(folder, fill_with("two"))
    recover_folder(folder)
    check_folder(folder)
    assert (folder / "inner" / "a.txt").read_text() == "two"
    write_folder(folder, fill_with("three"))
    assert (folder / "inner" / "a.txt").read_text() == "three"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def cut(folder):
    (folder / "b.txt").write_text("")


def turn_a_bit(folder):
    (folder / "b.txt").write_text("c")


def lose_a_file(folder):
    (folder / "inner" / "a.txt").unlink()


def lose_the_manifest(folder):
    (folder / "manifest.json").unlink()


def break_the_manifest(folder):
    (folder / "manifest.json").write_text("[1]")


@pytest.mark.parametrize("harm", [cut, turn_a_bit, lose_a_file, lose_the_manifest, break_the_manifest])
def test_damage_is_found(tmp_path, harm):
    folder = tmp_path / "x"
    write_folder(folder, fill_with("one"))
    harm(folder)
    with pytest.raises(RunError, match="is damaged"):
        check_folder(folder)


def test_an_unwritable_place_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        write_text(tmp_path / "file" / "x.json", "{}")
    with pytest.raises(RunError, match="cannot write"):
        write_folder(tmp_path / "file" / "x", fill_with("one"))


def test_text_is_replaced_in_one_step(tmp_path):
    write_text(tmp_path / "a.json", json.dumps({"a": 1}))
    write_text(tmp_path / "a.json", json.dumps({"a": 2}))
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 2}


def test_text_that_finds_no_place_leaves_nothing(tmp_path, monkeypatch):
    write_text(tmp_path / "a.json", "old")

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="No space left"):
        write_text(tmp_path / "a.json", "new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.json": "old"}
