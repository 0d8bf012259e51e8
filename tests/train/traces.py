"""What every trace file must be for Perfetto and chrome://tracing: the rules of the JSON trace event format."""

import json
import math
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


def events_of(path):
    """The events of a file that is plain JSON (no NaN) and has the keys of the format."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads(path.read_text(), parse_constant=refuse)
    assert found.keys() == {"traceEvents", "displayTimeUnit", "otherData"}
    assert found["displayTimeUnit"] in ("ms", "ns")
    check_events(found["traceEvents"])
    return found["traceEvents"]


def check_events(events):
    """Known phases, all fields, tracks with names, stretches of a track in order and not across each other, arrows whole."""
    assert {one["ph"] for one in events} <= {"M", "X", "s", "f"}
    named = [one["tid"] for one in events if one["name"] == "thread_name"]
    assert len(set(named)) == len(named), "a track has one name"
    assert sum(one["name"] == "process_name" for one in events) == 1
    for one in events:
        assert isinstance(one["name"], str)
        assert one["name"]
        assert one["pid"] == 1
        if one["ph"] == "M":
            assert one["name"] in ("process_name", "thread_name", "thread_sort_index")
            assert one["args"].keys() == {"sort_index" if one["name"] == "thread_sort_index" else "name"}
            continue
        assert 0 <= one["ts"] < math.inf
        assert one["cat"]
        assert one["tid"] in named, f"{one} is on a track without a name"
        if one["ph"] == "X":
            assert 0 <= one["dur"] < math.inf
        else:
            assert one.get("bp") == ("e" if one["ph"] == "f" else None), "an arrow ends on the stretch around it"
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
