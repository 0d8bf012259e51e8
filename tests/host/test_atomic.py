"""A file that is written beside its name: it takes the name whole, or nothing is left of it."""

import pytest

from hotbed.host.atomic import rewriting, write_file


@pytest.mark.parametrize("unique", [False, True])
def test_a_file_takes_its_name_at_the_end(tmp_path, unique):
    path = tmp_path / "a"
    path.write_text("old")
    with rewriting(path, unique=unique) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_nothing_is_left_after_an_error(tmp_path, error):
    path = tmp_path / "a"
    path.write_text("old")

    def fail():
        with rewriting(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(error):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_of_one_file_do_not_share_its_temporary_name(tmp_path):
    with rewriting(tmp_path / "a", unique=True) as first, rewriting(tmp_path / "a", unique=True) as second:
        assert first != second
        assert first.suffix == second.suffix == ".tmp"
        first.write_text("1")
        second.write_text("2")
    assert (tmp_path / "a").read_text() == "1"  # the last to end


def test_what_a_killed_writer_left_is_written_over(tmp_path):
    (tmp_path / "a.tmp").write_text("left")
    write_file(tmp_path / "a", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
