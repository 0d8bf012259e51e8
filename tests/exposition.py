"""Prometheus' text format 0.0.4 by its rules: what is served must be read by any scraper, not by ours alone."""

import math
import re

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? (NaN|[+-]Inf|-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)")
HEAD = re.compile(rf"# (HELP|TYPE) ({NAME}) (.+)")
PARTS = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}


def samples_of(text):
    """Name with labels -> value; an AssertionError says which rule is broken, and where."""
    assert text.endswith("\n")
    found, kinds, helped, family = {}, {}, set(), ""
    for line in text[:-1].split("\n"):
        if line.startswith("#"):
            head = HEAD.fullmatch(line)
            assert head, line
            kind, family, said = head.groups()
            assert family.isascii()
            if kind == "HELP":
                assert family not in helped, f"{family} is described twice"
                assert not re.search(r"(?<!\\)(?:\\\\)*\\(?![\\n])", said), (
                    f"{line}: only \\\\ and \\n are escapes of HELP"
                )
                helped.add(family)
            else:
                assert family not in kinds, f"{family} has its type twice"
                assert said in PARTS, line
                assert (said == "counter") == family.endswith("_total"), f"{family} is a {said}"
                kinds[family] = said
            continue
        sample = SAMPLE.fullmatch(line)
        assert sample, line
        name, labels, value = sample.groups()
        assert name in {family + part for part in PARTS[kinds[family]]}, f"{name} does not stand below {family}"
        assert family in helped, f"{family} has no help"
        names = re.findall(r"([a-zA-Z_][a-zA-Z0-9_]*)=\"", labels or "")
        assert len(set(names)) == len(names), line
        key = f"{name}{{{labels}}}" if labels else name
        assert key not in found, f"{key} is there twice"
        found[key] = float(value)
    for name in (name for name, kind in kinds.items() if kind == "histogram"):
        _check_histogram(name, found)
    return found


def _check_histogram(name, found):
    """Buckets rise by bound and by count, and the last one is of all."""
    buckets = [(key, value) for key, value in found.items() if key.startswith(f"{name}_bucket")]
    bounds = [float(re.search(r'le="([^"]+)"', key)[1]) for key, _ in buckets]
    counts = [value for _, value in buckets]
    assert bounds == sorted(bounds)
    assert bounds[-1] == math.inf
    assert counts == sorted(counts)
    assert counts[-1] == found[f"{name}_count"]
    assert found[f"{name}_sum"] >= 0
