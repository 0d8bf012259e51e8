"""What every trace file must be for Perfetto and chrome://tracing."""

from collections import defaultdict
from itertools import pairwise


def tracks_of(events):
    """Complete stretches by the name of their track."""
    names = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    found = defaultdict(list)
    for one in events:
        if one["ph"] == "X":
            found[names[one["tid"]]].append(one)
    return found


def check_events(events):
    """Known phases, all fields, tracks with names, stretches of a track in order and not across each other, arrows whole."""
    assert {one["ph"] for one in events} <= {"M", "X", "s", "f"}
    for one in events:
        assert one["name"]
        assert one["pid"] == 1
        if one["ph"] != "M":
            assert one["ts"] >= 0
        if one["ph"] == "X":
            assert one["dur"] >= 0
    for name, stretches in tracks_of(events).items():
        for before, after in pairwise(stretches):
            assert after["ts"] >= before["ts"], name
            assert after["ts"] >= before["ts"] + before["dur"] - 0.01, f"{name}: {before} {after}"
    starts, ends = ({one["id"]: one for one in events if one["ph"] == phase} for phase in "sf")
    assert starts.keys() == ends.keys()
    slices = [one for one in events if one["ph"] == "X"]
    for arrow in [*starts.values(), *ends.values()]:
        inside = [
            one
            for one in slices
            if one["tid"] == arrow["tid"] and one["ts"] - 0.01 <= arrow["ts"] <= one["ts"] + one["dur"] + 0.01
        ]
        assert inside, f"{arrow} is on no stretch"
    assert all(starts[number]["ts"] <= ends[number]["ts"] for number in starts), "a batch is read before it trains"
