"""Figures are reproducible: where a page tells one, a command stands beside it; every benchmark teaches how it is called.

A figure is a number with a unit, or with three decimals or more (an AUC), outside code, or a table of numbers whose head
names a unit. In its section, or in the text under the heading above, must be a command that prints it: a program of
benchmarks, hotbed, make, or a test. A number that nobody measured (a limit, a size by construction, an example) says so in a
comment of the section:

    <!-- figure: sizes by construction, tests/store holds them -->
"""

import argparse
import csv
import importlib
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.csv"))
CHILDREN = (
    "benchmarks.cluster.rank",
    "benchmarks.mutants.warm",
    "benchmarks.serve.load",
    "benchmarks.peers.run_",
)  # started by their parents alone

_RATES = r"(?:million )?(?:samples|rows|requests|lookups|records|reads|ids)(?:/s| a second)"
_UNITS = rf"ms|us|ns|s|x|%|[kMG]B|[KMGT]iB|[kMGT]B/s|bytes|seconds?|minutes?|hours?|times|points?|cores|{_RATES}"
_FIGURE = re.compile(rf"(?<![\w.])\d[\d,.]*\s?(?:{_UNITS})(?![\w/])|(?<![\w.])0\.\d{{3,}}\b")
_TABLE = re.compile(r"^\|(?P<head>[^\n]*)\|\n\|[ :|-]+\|\n\|[^\n]*\d", re.MULTILINE)
_HEAD = re.compile(r"\b(?:ms|us|ns|seconds|[kMG]B|samples/s|rows/s|[kMG]B/s|AUC|ratio)\b")
_COMMAND = re.compile(
    r"python -m \w+|python -c |\bmake (?:demo|bench|test)\b|\btests/[\w/]+|"
    r"\bhotbed (?:bench|data|evaluate|explain|plan|prepare|report|serve|simulate|train|verify) [^`\s]"
)
_MARK = re.compile(r"<!-- figure: (?P<reason>\S.*?) -->", re.DOTALL)
_HEADING = re.compile(r"^(#+) (.+)$")


class Section(NamedTuple):
    """A heading and the text below it, up to the next heading of any level."""

    title: str
    level: int
    text: str


def sections_of(page: str) -> list[Section]:
    found, title, level, lines, fenced = [], "", 0, [], False
    for line in page.splitlines():
        fenced ^= line.startswith("```")
        heading = None if fenced else _HEADING.match(line)
        if heading:
            found.append(Section(title, level, "\n".join(lines)))
            title, level, lines = heading[2], len(heading[1]), []
        else:
            lines.append(line)
    return [*found, Section(title, level, "\n".join(lines))]


def figures_in(text: str) -> list[str]:
    """Numbers with a unit in prose and tables, and heads of tables with one."""
    prose = re.sub(r"```.*?```|`[^`]*`|<!--.*?-->|^    .*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    heads = [unit[0] for table in _TABLE.finditer(prose) if (unit := _HEAD.search(table["head"]))]
    return [" ".join(found[0].split()) for found in _FIGURE.finditer(prose)] + heads


def without_command(page: str) -> list[str]:
    """Sections that tell figures and no way to get them."""
    found: list[str] = []
    above: dict[int, str] = {}
    for section in sections_of(page):
        above = {level: text for level, text in above.items() if 1 < level < section.level}
        figures = figures_in(section.text)
        around = "\n".join([section.text, *above.values()])
        if figures and not _COMMAND.search(" ".join(around.split())) and not _MARK.search(section.text):
            found.append(f"{section.title}: {', '.join(figures[:6])}")
        above[section.level] = section.text
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_figures_have_a_command(page):
    found = without_command(page.read_text())
    how = "Name the command that prints them in the section, or say why there is none: <!-- figure: REASON -->."
    assert not found, "\n".join([*found, how])


@pytest.mark.parametrize(
    "figure",
    ["3.00 ms", "1.79x", "5 %", "111,000 samples/s", "1.7 GB/s", "243 MB", "22 bytes", "0.7956", "57 s", "8.3 times"],
)
def test_a_figure_without_a_command_is_found(figure):
    text = f"# Page\n\n`make demo`\n\n## Speed\n\n| system | {figure} |\n"
    assert without_command(text) == [f"Speed: {figure}"]
    assert not without_command(text + "\n`python -m benchmarks.x`\n")
    assert not without_command(text + "\n```console\nhotbed bench --dim 16\n```\n")
    assert not without_command(text + "\n<!-- figure: a limit -->\n")
    assert without_command(text + "\n## Other\n\n`python -m benchmarks.x`\n")
    assert not without_command(text.replace("## Speed", "## Speed\n\n`python -m\nbenchmarks.x`\n\n### Dim 16"))


def test_a_table_whose_head_names_a_unit_is_one():
    assert without_command("## Speed\n\n| batch | ms |\n|---|---|\n| 16 | 0.8 |\n") == ["Speed: ms"]
    assert not without_command("## Names\n\n| column | what it is, ms |\n|---|---|\n| step | its time |\n")


@pytest.mark.parametrize(
    "text", ["26 tables of 16 columns", "`--limit 5 s`", "```\n3 ms\n```", "version 2.13.0", "Python 3.11"]
)
def test_other_numbers_are_no_figures(text):
    assert not without_command(f"## Section\n\n{text}\n")


def benchmark_modules() -> list[str]:
    """Programs of benchmarks, by the name after `python -m`."""
    found = []
    for file in sorted((ROOT / "benchmarks").rglob("*.py")):
        if '__name__ == "__main__"' in file.read_text():
            found.append(".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__"))
    return [name for name in found if not name.startswith(CHILDREN)]


def source_of(name: str) -> str:
    file = ROOT / Path(*name.split("."))
    return (file / "__main__.py" if file.is_dir() else file.with_suffix(".py")).read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_benchmarks_that_pages_name_exist(page):
    text = re.sub(r"\s+", " ", page.read_text().replace("\npython", " ; python").replace("`", " ; "))
    for name, options in re.findall(r"python -m (benchmarks[.\w]*\w)([^;]*)", text):
        assert name in benchmark_modules(), name
        for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", options):
            assert f'"{option}"' in source_of(name), f"python -m {name} has no {option}"


def test_benchmarks_are_listed():
    text = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    missing = [name for name in benchmark_modules() if not re.search(rf"python -m {re.escape(name)}\b(?!\.)", text)]
    assert not missing


@pytest.mark.parametrize("name", benchmark_modules())
def test_benchmarks_teach(name, monkeypatch, capsys):
    """--help ends well, shows a call to copy, and says something of every option."""
    made: list[argparse.ArgumentParser] = []
    real = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda self, *a: (made.append(self), real(self, *a))[1])
    monkeypatch.setattr("sys.argv", [name, "--help"])
    is_folder = (ROOT / Path(*name.split("."))).is_dir()
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"{name}.__main__" if is_folder else name).main()
    assert ended.value.code in (0, None)
    shown = capsys.readouterr().out
    assert f"python -m {name}" in shown
    (parser,) = made
    assert not [action.dest for action in parser._actions if not action.help]


def test_result_files_are_quoted():
    """Every file of results is named by a page, and every file of results that a page links to is there."""
    texts = {page: page.read_text() for page in PAGES}
    missing = [file.name for file in RESULTS if not any(file.name in text for text in texts.values())]
    assert not missing
    for page, text in texts.items():
        for name in re.findall(r"benchmarks/results/(\w+\.csv)", text):
            assert (ROOT / "benchmarks" / "results" / name).exists(), f"{page.name} names {name}"


def test_whole_training_runs(monkeypatch, tmp_path):
    """The program of a table in README.md, small, from its first line to its last."""
    from benchmarks import deepfm_training

    found = tmp_path / "found.csv"
    monkeypatch.setattr(deepfm_training, "_TURN", 2)
    monkeypatch.setattr("sys.argv", ["it", "--data", "adult", "--steps", "4", "--out", str(found)])
    deepfm_training.main()
    assert [line.split(",")[1] for line in found.read_text().splitlines()[1:]] == [
        "hotbed",
        "nn.Embedding + torch.optim",
    ]


def rows_of(text: str) -> list[str]:
    """Lines of Markdown tables, but for rules."""
    return [line.strip() for line in text.splitlines() if line.startswith("|") and "---" not in line]


def test_tables_made_from_results_are_on_their_pages(monkeypatch, capsys, tmp_path):
    """docs/scaling.md and docs/kstep.md hold what their programs print of the files of results, line by line."""
    from benchmarks import kstep, kstep_page, scaling

    monkeypatch.setattr("sys.argv", ["it"])
    scaling.main()
    kstep_rows = kstep_page.write_page(kstep.rows_in(kstep.AUC), kstep.rows_in(kstep.TIME), tmp_path / "plot.svg")
    for page, printed in (("scaling.md", capsys.readouterr().out), ("kstep.md", kstep_rows)):
        rows = rows_of(printed)
        assert len(rows) > 30
        assert not [row for row in rows if row not in (ROOT / "docs" / page).read_text()], page


def test_results_of_other_columns_stay_in_line(tmp_path):
    from benchmarks.results_file import append_rows

    file = tmp_path / "found.csv"
    append_rows(str(file), [{"system": "a", "ms": 1}])
    append_rows(str(file), [{"system": "b", "samples": 7}, {"system": "c", "samples": 8}])
    append_rows(str(file), [])
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["system"], row["ms"], row["samples"]) for row in rows] == [
        ("a", "1", ""),
        ("b", "", "7"),
        ("c", "", "8"),
    ]
    assert all(row["python"] for row in rows)
