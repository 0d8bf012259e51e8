"""The list of public sets: every entry can be shown, fetched or explained."""

import re

import pytest

from hotbed.data.catalog import CATALOG, choose_folders, find_public_set
from hotbed.errors import ConfigError


@pytest.mark.parametrize("entry", CATALOG, ids=lambda entry: entry.name)
def test_entries_are_complete(entry):
    assert entry.licence
    assert entry.page.startswith("https://")
    assert entry.then
    assert bool(entry.files or entry.folders) != bool(entry.by_hand)
    assert bool(entry.folders) == bool(entry.suffixes)
    for file in entry.files:
        assert file.address.startswith("https://")
        assert file.address.endswith(file.name)
        assert file.checksum == "" or re.fullmatch("md5:[0-9a-f]{32}|sha256:[0-9a-f]{64}", file.checksum)
    for folder in entry.folders:
        assert folder.listing.startswith("https://huggingface.co/api/datasets/")
        assert folder.address("a/b.zip").endswith("/resolve/main/a/b.zip")


def test_the_well_known_sets_are_there():
    names = [entry.name for entry in CATALOG]
    assert len(set(names)) == len(names)
    assert {"criteo-kaggle", "criteo-1tb", "avazu", "movielens-1m", "movielens-20m", "movielens-25m", "frappe"} <= set(
        names
    )


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ConfigError, match=r"'criteo' is not in the catalog\. Known sets: criteo-kaggle, criteo-1tb"):
        find_public_set("criteo")


def test_days():
    criteo = find_public_set("criteo-1tb")
    first, last = choose_folders(criteo, (0, 23, 0))
    assert (first.path, last.path) == ("data/day=2015-02-15", "data/day=2015-03-10")
    assert (first.place, last.place) == ("day_0", "day_23")
    for days in ((), (24,), (-1, 3)):
        with pytest.raises(ConfigError, match=r"choose days of 0 \.\. 23 with --day"):
            choose_folders(criteo, days)
    with pytest.raises(ConfigError, match="frappe is not"):
        choose_folders(find_public_set("frappe"), (1,))
    assert choose_folders(find_public_set("frappe"), ()) == find_public_set("frappe").folders
