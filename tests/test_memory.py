import pytest
import torch

from hotbed import memory
from hotbed.memory import available_memory, in_words


def test_this_machine_has_some_memory():
    amount = available_memory(torch.device("cpu"))
    assert amount is None or 1 << 20 < amount < 1 << 50


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
