"""What RowFile writes, Parquet readers read; and what it writes comes back to the bit."""

import errno
import json
import os
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.checkpoint import RowPart, files, row_file
from hotbed.checkpoint.files import mean_of
from hotbed.checkpoint.read import new_room, parts_of, read_whole
from hotbed.checkpoint.row_file import CopyBuffer, FileMark, RowFile, columns_of, split_parts
from hotbed.errors import RunError

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def part_of(table, count, dim, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    records = torch.randn(count, 2 * dim + 3, generator=generator)  # columns are strided, as in records
    columns = {
        "weight": records[:, :dim].to(dtype) if dtype != torch.float32 else records[:, :dim],
        "sum": records[:, dim : 2 * dim],
        "count": records[:, 2 * dim : 2 * dim + 1],
        "last_used": torch.arange(count) * 3,
    }
    return RowPart(table, torch.randint(-(2**62), 2**62, (count,), generator=generator), columns)


def write(path, parts):
    file, scratch = None, CopyBuffer()
    for part in split_parts(parts):
        file = file or RowFile(path, columns_of(part))
        file.add(scratch.copy(part))
    return file.close()


def joined(parts):
    """{table: (ids, columns)} with bits as integers."""
    found = {}
    for part in parts:
        ids, columns = found.setdefault(part.table, ([], {}))
        ids += part.ids.tolist()
        for name, column in part.columns.items():
            columns.setdefault(name, []).append(column.contiguous().view(torch.uint8).clone())
    return {table: (ids, {name: torch.cat(c).tolist() for name, c in cs.items()}) for table, (ids, cs) in found.items()}


@given(
    sizes=st.lists(st.tuples(st.sampled_from(["user", "ad", "ключ"]), st.integers(1, 300)), min_size=1, max_size=5),
    dim=st.sampled_from([1, 2, 3, 7, 8, 16, 33]),
    dtype=st.sampled_from(DTYPES),
    group=st.sampled_from([64, 3000, 1 << 20]),
)
@settings(max_examples=60, deadline=None)
def test_rows_come_back_to_the_bit(tmp_path_factory, sizes, dim, dtype, group):
    path = tmp_path_factory.mktemp("rows") / "a.parquet"
    parts = [part_of(table, count, dim, dtype, seed) for seed, (table, count) in enumerate(sizes)]
    before, row_file.GROUP_BYTES = row_file.GROUP_BYTES, group
    try:
        mark = write(path, parts)
    finally:
        row_file.GROUP_BYTES = before
    content = read_whole(path, mark)
    assert zlib.crc32(content) == mark.crc32
    assert joined(parts_of(path, content)) == joined(parts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 2, 3, 16])
def test_pyarrow_reads_the_same(tmp_path, monkeypatch, dtype, dim):
    monkeypatch.setattr(row_file, "GROUP_BYTES", 5000)
    path = tmp_path / "a.parquet"
    parts = [part_of("user", 1000, dim, dtype), part_of("ad", 1, dim, dtype, 1)]
    write(path, parts)
    table = pq.read_table(path)
    table.validate(full=True)
    assert table.column_names == ["table", "id", "vector", "sum", "count", "last_used"]
    assert table["table"].to_pylist() == ["user"] * 1000 + ["ad"]
    assert table["id"].to_pylist() == [one for part in parts for one in part.ids.tolist()]
    weights = torch.cat([part.columns["weight"] for part in parts])
    if dtype == torch.bfloat16:
        found = np.frombuffer(b"".join(table["vector"].to_pylist()), dtype=np.int16).reshape(-1, dim)
        assert np.array_equal(found, weights.view(torch.int16).numpy())
    else:
        assert table["vector"].type.list_size == dim
        assert np.array_equal(np.array(table["vector"].to_pylist(), dtype=weights.numpy().dtype), weights.numpy())
    sums = torch.cat([part.columns["sum"] for part in parts]).numpy()
    assert np.array_equal(np.array(table["sum"].to_pylist(), dtype=np.float32).reshape(-1, dim), sums)
    assert np.array_equal(table["count"].to_numpy(), torch.cat([p.columns["count"] for p in parts]).numpy()[:, 0])
    assert pq.ParquetFile(path).num_row_groups > 2


def test_sixteen_bits_stay_sixteen_bits(tmp_path):
    sizes = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        part = RowPart("a", torch.arange(10_000), {"weight": torch.randn(10_000, 32).to(dtype)})
        sizes[dtype] = write(tmp_path / "a.parquet", [part]).bytes
    assert sizes[torch.bfloat16] < sizes[torch.float16] < 0.62 * sizes[torch.float32]


def test_columns_are_aligned(tmp_path):
    """Kernels take rows from where they were read."""
    path = tmp_path / "a.parquet"
    content = read_whole(path, write(path, [part_of("user", 77, 5, torch.float32)]))
    for part in parts_of(path, content):
        for column in (part.ids, *part.columns.values()):
            assert (column.data_ptr() - content.ctypes.data) % 64 == 0


@pytest.mark.parametrize("harm", ["flip", "cut", "grow", "lose"])
def test_damage_is_found_before_a_row_is_read(tmp_path, harm):
    path = tmp_path / "a.parquet"
    mark = write(path, [part_of("user", 500, 4, torch.float32)])
    content = bytearray(path.read_bytes())
    if harm == "flip":
        content[len(content) // 2] ^= 4
    path.write_bytes({"cut": content[:-9], "grow": content + b"x"}.get(harm, content))
    if harm == "lose":
        path.unlink()
    with pytest.raises(RunError, match=r"a\.parquet (is damaged|cannot be read)"):
        read_whole(path, mark)


@pytest.mark.parametrize("refused_at", ["open", "preadv"])
def test_a_file_system_that_only_reads_through_its_cache(tmp_path, monkeypatch, refused_at):
    path = tmp_path / "a.parquet"
    mark = write(path, [part_of("user", 500, 4, torch.float32)])
    flags_of, real_open, real_preadv = {}, os.open, os.preadv

    def refuse(flags):
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def open_(name, flags, *rest):
        if refused_at == "open":
            refuse(flags)
        handle = real_open(name, flags, *rest)
        flags_of[handle] = flags
        return handle

    def preadv(handle, buffers, offset):
        refuse(flags_of[handle])
        return real_preadv(handle, buffers, offset)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "preadv", preadv)
    assert zlib.crc32(read_whole(path, mark)) == mark.crc32


def test_a_disk_that_fails_is_not_asked_again_through_the_cache(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    mark = write(path, [part_of("user", 500, 4, torch.float32)])
    real_preadv, calls = os.preadv, []

    def preadv(*given):
        calls.append(given)
        if len(calls) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real_preadv(*given)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(RunError, match=r"a\.parquet cannot be read: Input/output error"):
        read_whole(path, mark)
    assert len(calls) == 1


@pytest.mark.parametrize("most", [4096, 512 * 5])
def test_short_reads_are_continued(tmp_path, monkeypatch, most):
    path = tmp_path / "a.parquet"
    mark = write(path, [part_of("user", 3000, 4, torch.float32)])
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda handle, buffers, offset: real(handle, [buffers[0][:most]], offset))
    assert zlib.crc32(read_whole(path, mark)) == mark.crc32


@pytest.mark.parametrize(
    ("result", "said"), [(0, r"it ends after 0 of \d+ bytes"), (errno.EIO, "cannot be read: Input/output error")]
)
def test_a_disk_that_does_not_give_the_bytes(tmp_path, monkeypatch, result, said):
    path = tmp_path / "a.parquet"
    mark = write(path, [part_of("user", 500, 4, torch.float32)])

    def preadv(*_):
        if result:
            raise OSError(result, os.strerror(result))
        return 0

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(RunError, match=said):
        read_whole(path, mark)


def test_a_room_serves_files_of_any_smaller_size(tmp_path):
    room = new_room(100_000)
    for number, count in enumerate((900, 7, 300)):
        path = tmp_path / f"{number}.parquet"
        mark = write(path, [part_of("user", count, 4, torch.float32)])
        content = read_whole(path, mark, room)
        assert content.ctypes.data == room.ctypes.data
        assert content.tobytes() == path.read_bytes()


def test_another_parquet_file_is_reported(tmp_path):
    path = tmp_path / "b.parquet"
    pq.write_table(pa.table({"id": [1]}), path)
    content = path.read_bytes()
    with pytest.raises(RunError, match="holds no rows of hotbed"):
        list(parts_of(path, read_whole(path, FileMark(len(content), zlib.crc32(content)))))


def test_row_groups_name_their_table(tmp_path):
    path = tmp_path / "a.parquet"
    write(path, [part_of("user", 3, 2, torch.float32), part_of("ad", 3, 2, torch.float32)])
    assert json.loads(pq.read_metadata(path).metadata[b"hotbed:tables"]) == ["user", "ad"]


def test_parts_are_cut_at_the_size_of_a_row_group(monkeypatch):
    part = RowPart("user", torch.arange(10), {"weight": torch.randn(10, 4)})
    assert [len(one.ids) for one in split_parts([part])] == [10]
    monkeypatch.setattr(row_file, "GROUP_BYTES", part.num_bytes // 10 * 4)
    assert [len(one.ids) for one in split_parts([part])] == [4, 4, 2]
    monkeypatch.setattr(row_file, "GROUP_BYTES", 1)  # a row that is larger than a group is one
    assert [len(one.ids) for one in split_parts([part])] == [1] * 10


@pytest.mark.parametrize("piece", [1, 40, 1 << 20])
def test_tensors_are_the_same_whatever_the_pieces_in_which_they_are_written(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(files, "_PIECE", piece)
    tensors = {"a": torch.randn(7, 5), "b": torch.tensor(3), "c": torch.randn(6, 4).t(), "d": torch.empty(0, 3)}
    files.write_tensors(tmp_path / "t", tensors)
    found = files.read_tensors(tmp_path / "t")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name
    sizes = [len(one) for one in files._pieces(tensors["a"])]
    assert sizes == {1: [5] * 7, 40: [10, 10, 10, 5]}.get(piece, [35])


def test_dense_weights_of_ranks_are_averaged_where_they_differ():
    one = {"w": torch.tensor([0.1, 3.0]), "same": torch.tensor([0.1]), "step": torch.tensor(7)}
    other = {"w": torch.tensor([0.3, 5.0]), "same": torch.tensor([0.1]), "step": torch.tensor(9)}
    found = mean_of([one, other, one])
    assert torch.equal(found["w"], torch.tensor([(0.1 + 0.3 + 0.1) / 3, 11 / 3]))
    assert found["same"] is one["same"]  # a mean of three may round
    assert torch.equal(found["step"], torch.tensor(7))
