"""Writes the pages that come from the sources: commands, settings, JSON, and the chart of step times.

    python docs/generate.py            write them
    python docs/generate.py --check    name those that are not current, exit code 1

`tests/test_reference.py` checks that they are current.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hotbed.cli import COMMANDS
from hotbed.cli.describe import CommandText, Parameter, describe_commands
from hotbed.cli.schemas import SCHEMAS
from hotbed.run.config import FIELDS

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"
NOTE = "<!-- written by docs/generate.py -->"
GROUPS = {
    "Start": "from a log to a trained model",
    "Understand": "what a run does and needs",
    "Operate": "runs that train, and models in use",
}
EXIT_CODES = {
    0: "success; also of `serve` that was stopped by a signal",
    1: "failure: data, runs or stores that cannot be read or written, a check that finds a difference, or a bug",
    2: "usage: a wrong option or setting",
    3: "it does not fit: in memory, on the disk, in a cache, or under a cap",
    130: "Ctrl-C (SIGINT); `train` saves first",
    143: "SIGTERM; `train` saves first",
}


def pages() -> dict[Path, str]:
    """{file: text} of everything that is generated."""
    found = {HERE / "commands.md": commands_page(), HERE / "configuration.md": settings_page()}
    found |= {HERE / "json.md": json_page(), HERE / "steps.svg": steps_chart()}
    texts = list(describe_commands())
    for name in COMMANDS:
        parts = [text for text in texts if text.name.split()[0] == name]
        found[HERE / "commands" / f"{name}.md"] = command_page(name, parts)
    return found


def commands_page() -> str:
    lines = ["# Commands", "", NOTE, "", "<!-- figure: ways to write sizes -->", ""]
    lines += [
        "One grammar: an option of one name means the same in every command. `-h` shows help, `-q` prints only the result, "
        "`-v` says more, `--json` prints the result [as JSON](json.md), `--dry-run` checks everything and writes nothing, "
        "`--log-json` writes progress, messages and errors as [JSON lines](watching.md#logs-as-json). "
        "Shares are written 0.015 or 1.5%, sizes 500MB or 2GiB. `hotbed --install-completion` sets up your shell.",
        "",
    ]
    lines += [
        "| exit code | meaning |",
        "|---|---|",
        *(f"| {code} | {text} |" for code, text in EXIT_CODES.items()),
        "",
    ]
    for group, about in GROUPS.items():
        lines += [f"## {group}: {about}", "", "| command | what it does |", "|---|---|"]
        for name, entry in COMMANDS.items():
            if entry.group == group:
                lines.append(f"| [hotbed {name}](commands/{name}.md) | {_cell(entry.summary)} |")
        lines.append("")
    hidden = "\n".join(f"commands/{name}" for name in COMMANDS)
    return "\n".join([*lines, "```{toctree}", ":hidden:", "", hidden, "```", ""])


def command_page(name: str, parts: list[CommandText]) -> str:
    lines = [f"# hotbed {name}", "", NOTE, "", *([COMMANDS[name].summary, ""] if len(parts) > 1 else [])]
    for part in parts:
        deep = len(parts) > 1
        if deep:
            lines += [f"## hotbed {part.name}", ""]
        for paragraph in part.paragraphs:
            lines += [_prose(paragraph), ""]
        lines += [
            "<!-- not run: tests/test_cli_grammar.py runs one of them -->",
            "```console",
            *part.examples,
            "```",
            "",
        ]
        lines += _session(part.name)
        lines += _table("argument", [one for one in part.parameters if not one.is_option])
        lines += _table("option", [one for one in part.parameters if one.is_option])
        if part.name in SCHEMAS:
            lines += [f"With `--json`: [its properties](../json.md#hotbed-{part.name.replace(' ', '-')}).", ""]
    return "\n".join(lines)


def _session(name: str) -> list[str]:
    """A recorded terminal session, if there is one."""
    file = HERE / "sessions" / f"{name.replace(' ', '-')}.txt"
    if not file.is_file():
        return []
    return [
        "A session, as recorded by `python -m tests.sessions`:",
        "",
        "```text",
        file.read_text().rstrip(),
        "```",
        "",
    ]


def _table(kind: str, parameters: list[Parameter]) -> list[str]:
    if not parameters:
        return []
    lines = [f"| {kind} | what it is |", "|---|---|"]
    for one in parameters:
        names = ", ".join(f"`{name}`" for name in (one.name, *one.also))
        value = f" `{one.metavar}`" if one.is_option and one.metavar else ""
        needed = " Required." if one.required else ""
        usual = "" if one.required or one.default in (None, False, [], "") else f" Default: `{_plain(one.default)}`."
        lines.append(f"| {names}{_cell(value)} | {_cell(_prose(one.help) + needed + usual)} |")
    return [*lines, ""]


def settings_page() -> str:
    lines = ["# Settings", "", NOTE, ""]
    lines += [
        "Every setting of a run, by section. A run file (YAML, TOML or JSON) holds any of them, `--set path=value` changes "
        "one, `hotbed train --show` prints all with their values. Wrong names and values are reported all at once.",
        "",
    ]
    section = ""
    for path, field in FIELDS.items():
        if path.split(".")[0] != section:
            section = path.split(".")[0]
            lines += [
                "",
                f"## {section}",
                "",
                "<!-- figure: defaults and limits -->",
                "",
                "| setting | default | what it is |",
                "|---|---|---|",
            ]
        about = field.metadata["about"]
        text = about[:1].upper() + about[1:] if about.split(" ")[0].islower() else about
        lines.append(f"| `{path}` | `{_default(field)}` | {_cell(_prose(text))}{_limits(field.metadata)} |")
    return "\n".join(lines) + "\n"


def _default(field: dataclasses.Field[Any]) -> str:
    made = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
    return _plain(made)


def _limits(facts: Any) -> str:
    said = [f"at least {facts['least']}"] if facts.get("least") is not None else []
    said += [f"above {facts['above']}"] if facts.get("above") is not None else []
    said += [f"at most {facts['most']}"] if facts.get("most") is not None else []
    said += [f"one of {', '.join(map(str, facts['one_of']))}"] if facts.get("one_of") else []
    return f" ({'; '.join(said)})" if said else ""


def json_page() -> str:
    lines = ["# JSON of the commands", "", NOTE, ""]
    lines += [
        "What `--json` prints, by command. Listed properties keep their name and type until the next major version; commands "
        "may print more. Numbers that JSON does not have (NaN, infinity) are null. As JSON Schema, for a validator:",
        "",
        "```python",
        "from hotbed.cli.schemas import SCHEMAS",
        "",
        'print(SCHEMAS["evaluate"]["required"])',
        "```",
        "",
    ]
    for name, schema in SCHEMAS.items():
        lines += [
            f"## hotbed {name}",
            "",
            "<!-- figure: examples of values -->",
            "",
            "| property | type | what it is |",
            "|---|---|---|",
        ]
        lines += [f"| `{path}` | {kind} | {_cell(about)} |" for path, kind, about in _properties(schema, "")]
        lines.append("")
    return "\n".join(lines)


def _properties(schema: dict[str, Any], above: str) -> Iterator[tuple[str, str, str]]:
    required = schema.get("required", [])
    for name, one in schema.get("properties", {}).items():
        path, kind = f"{above}{name}", one.get("type", "any")
        kinds = " or ".join(kind) if isinstance(kind, list) else kind
        known = f" One of {', '.join(one['enum'])}." if "enum" in one else ""
        about = (one.get("description") or "") + known
        yield path, kinds + ("" if name in required else ", optional"), about
        yield from _properties(one, f"{path}.")
        yield from _properties(one.get("items", {}), f"{path}[].")
        more = one.get("additionalProperties")
        yield from _properties(more if isinstance(more, dict) else {}, f"{path}.*.")


class Bar(NamedTuple):
    """A bar of the chart: the time of a system in one case."""

    system: str
    ms: float


CASES = (
    ("one id a feature, dim 128, 1.5 % cached", "128", "16384", "0", "single"),
    ("the same, dim 64", "64", "16384", "0", "single"),
    ("the same, dim 32", "32", "16384", "0", "single"),
    ("dim 128 with an MLP", "128", "16384", "1024", "single"),
    ("dim 32 with an MLP", "32", "16384", "1024", "single"),
    ("Zipf 0.9, batch 32,768, 3 % cached", "128", "32768", "0", "single"),
    ("MLPerf's bags, dim 128, 5 % cached", "128", "4096", "0", "bags"),
)
SYSTEMS = {
    "fbgemm-hbm": ("FBGEMM, all rows on the GPU", "#2f77c0"),
    "fbgemm-lru-managed": ("FBGEMM's best cache", "#8ab4dd"),
    "hotbed-hbm": ("hotbed, all rows on the GPU", "#c2571a"),
    "hotbed-cached": ("hotbed, cached", "#e6a06f"),
}


def measured() -> list[tuple[str, list[Bar]]]:
    """Milliseconds of a step by case, from the newest results of an H200 that have it; the slowest of repeated measurements."""
    found = []
    for title, *setting in CASES:
        slowest: dict[str, float] = {}
        for name in ("h200_bars_pieces.csv", "h200_bars_all_rows.csv"):
            with (RESULTS / name).open() as file:
                rows = [] if slowest else list(csv.DictReader(file))
            for row in rows:
                if [row[column] for column in ("dim", "batch", "dense", "ids")] == setting:
                    slowest[row["system"]] = max(slowest.get(row["system"], 0.0), float(row["ms_p50"]))
        found.append((title, [Bar(system, slowest[system]) for system in SYSTEMS if system in slowest]))
    return found


def steps_chart() -> str:
    """Bars of milliseconds, one group for each case."""
    left, width, height, gap = 250, 400, 13, 12
    cases = measured()
    scale = width / max(bar.ms for _, bars in cases for bar in bars)
    lines, y = list[str](), 62
    for title, bars in cases:
        middle = y + height * len(bars) / 2 + 4
        lines.append(f'<text x="{left - 10}" y="{middle:.0f}" text-anchor="end">{title}</text>')
        for bar in bars:
            long = bar.ms * scale
            lines.append(
                f'<rect x="{left}" y="{y}" width="{long:.1f}" height="{height - 2}" fill="{SYSTEMS[bar.system][1]}"/>'
            )
            lines.append(f'<text class="n" x="{left + long + 5:.1f}" y="{y + 9}">{bar.ms:.2f}</text>')
            y += height
        y += gap
    legend, x = list[str](), 10
    for name, color in SYSTEMS.values():
        legend.append(
            f'<rect x="{x}" y="31" width="11" height="11" fill="{color}"/><text x="{x + 16}" y="41">{name}</text>'
        )
        x += 34 + 6.6 * len(name)
    title = "Milliseconds of an embedding or training step on one H200, shorter is better"
    style = (
        "text{font:12px sans-serif;fill:#24292f}.t{font-weight:bold;font-size:14px}.n{font-size:11px}.paper{fill:#fff}"
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.paper{fill:#131416}}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {y}" role="img" aria-label="{title}">'
    parts = [head, f"<style>{style}</style>", f'<rect class="paper" width="720" height="{y}"/>']
    return "\n".join([*parts, f'<text class="t" x="10" y="18">{title}</text>', *legend, *lines, "</svg>", ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _prose(text: str) -> str:
    """Text whose angle brackets and stars are not markup."""
    return text.replace("<", "&lt;").replace("*", "\\*")


def _plain(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, default=str)


def main() -> None:
    stale = [path for path, text in pages().items() if not path.is_file() or path.read_text() != text]
    if "--check" in sys.argv:
        sys.exit("\n".join(f"{path} is not current: python docs/generate.py" for path in stale) or 0)
    for path in stale:
        path.write_text(pages()[path])
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
