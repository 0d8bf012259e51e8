import mmap

import pytest
import torch

from hotbed.errors import ConfigError
from hotbed.host import memory
from hotbed.host.memory import available_memory, in_words, parse_bytes, resident_memory


def test_this_machine_has_some_memory():
    amount = available_memory(torch.device("cpu"))
    assert amount is None or 1 << 20 < amount < 1 << 50


def test_this_process_takes_some_memory():
    before = resident_memory()
    if before is None:
        pytest.skip("needs /proc")
    with mmap.mmap(-1, 64 << 20) as held:  # its pages are new ones; those of a tensor may be the heap's already
        held[:: mmap.PAGESIZE] = bytes(len(held) // mmap.PAGESIZE)
        grown = resident_memory() - before
    assert 48 << 20 < grown < 128 << 20


@pytest.mark.parametrize(
    ("amount", "words"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.5 KiB"),
        (3 << 30, "3.0 GiB"),
        (5 << 40, "5.0 TiB"),
        (5 << 50, "5120.0 TiB"),
    ],
)
def test_in_words(amount, words):
    assert in_words(amount) == words


@pytest.mark.parametrize(
    ("given", "amount"),
    [
        ("2GiB", 2 << 30),
        (" 2 gib ", 2 << 30),
        ("1.5 GiB", 3 << 29),
        (".5KiB", 512),
        ("64GB", 64 * 10**9),
        ("2MB", 2 * 10**6),
        ("3TiB", 3 << 40),
        ("0.1GB", 10**8),  # exact, though 0.1 is no binary fraction
        ("17", 17),
        ("17 bytes", 17),
        ("17B", 17),
        (1 << 33, 1 << 33),
    ],
)
def test_amounts(given, amount):
    assert parse_bytes(given, "hbm") == amount


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "hbm: must be an amount of memory such as 2GiB, 512MiB or 2GB, not ''"),
        ("much", "not 'much'"),
        ("2 GiBs", "the units are bytes, KiB"),
        ("2G", "2GiB is in steps of 1024, 2GB in steps of 1000"),
        ("-2GiB", "not '-2GiB'"),
        ("1e9", "not '1e9'"),
        ("1,5GiB", "not '1,5GiB'"),
        ("\u0661GiB", "such as 2GiB"),
        ("0GiB", "at least 1 byte"),
        (0, "at least 1 byte"),
        (-5, "at least 1 byte"),
        ("9999999TiB", "below 8 EiB"),
        (1.5, "not 1.5"),
        (True, "not True"),
        (None, "not None"),
    ],
)
def test_what_is_no_amount(given, said):
    with pytest.raises(ConfigError) as caught:
        parse_bytes(given, "hbm")
    assert str(caught.value).startswith("hbm: must be an amount of memory")
    assert said in str(caught.value)


def test_a_container_counts_with_its_file_cache(tmp_path):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    assert memory._container(tmp_path) == 100
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 250\n")
    assert memory._container(tmp_path) == 350
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._container(tmp_path) is None


def test_the_older_container_layout(tmp_path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("1000\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("2000\n")
    assert memory._container(tmp_path) == 0


def test_a_system_that_says_nothing(monkeypatch):
    monkeypatch.setattr(memory, "_machine", lambda: None)
    monkeypatch.setattr(memory, "_container", lambda: None)
    assert available_memory(torch.device("cpu")) is None
