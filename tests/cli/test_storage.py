"""What `train` says at its end of tiers and dynamic ids."""

import re

from rich.console import Console

from hotbed.cli.messages import id_table, tiers_text

TIERS = {
    "memory_hit_rate": 0.75,
    "from_memory": 3000,
    "from_ssd": 1000,
    "to_ssd": 2000,
    "bytes_read": 3 << 20,
    "wear": 9 << 20,
    "compactions": 1,
    "memory_bytes": 5 << 20,
    "memory_budget": 8 << 20,
    "ssd_bytes": 6 << 20,
    "ssd_cap": 64 << 20,
    "live_share": 0.8,
}


def test_tiers_in_words():
    assert tiers_text(TIERS).splitlines() == [
        "memory: 75.0 % of 4,000 rows requested below the device were in memory; 5.0 MiB of 8.0 MiB taken",
        "ssd: 1,000 rows (3.0 MiB) read, 2,000 written; in all 9.0 MiB written by this process, with 1 compaction; "
        "6.0 MiB of 64.0 MiB taken, 80 % live",
    ]
    alone = tiers_text({**TIERS, "memory_hit_rate": None, "compactions": 1234})
    assert alone.startswith("memory: 5.0 MiB of 8.0 MiB taken")
    assert "1,234 compactions" in alone


def printed(ids):
    console = Console(width=100, record=True, quiet=False)
    with console.capture() as found:
        console.print(id_table(ids))
    return [re.findall(r"[\w,]+", line) for line in found.get().splitlines() if "│" in line]


def counts(rows):
    return {"seen": 1000, "admitted": rows + 2, "rejected": 5, "expired": 2, "rows": rows}


def test_ids_in_a_table():
    assert printed({"user": counts(3)}) == [["user", "1,000", "5", "5", "2", "3"]]
    many = printed({f"t{n}": counts(n) for n in range(14)})
    assert [line[0] for line in many] == [f"t{n}" for n in range(13, 1, -1)] + ["2", "all"]
    assert many[-2] == ["2", "more", "2,000", "5", "10", "4", "1"]
    assert many[-1] == ["all", "14,000", "119", "70", "28", "91"]


def test_a_run_over_an_ssd_with_dynamic_ids_tells(hotbed, tmp_path):
    result = hotbed(
        *("train", "--data", "criteo-like:3000", "--dynamic", "--hbm", "2MiB", "--memory", "16MiB"),
        *("--ssd", f"{tmp_path / 'ssd'}:16MiB", "--set", "data.batch_size=256", "--out", tmp_path / "run"),
    )
    assert result.code == 0, result.err
    assert re.search(r"all +│ +78,000 ", result.out)
    assert re.search(r"memory: .* of 16\.0 MiB taken", result.out)
    assert re.search(r"ssd: .* of 16\.0 MiB taken, \d+ % live", result.out)
