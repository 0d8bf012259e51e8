"""Pages that are written from the sources are current, and every public name has its arguments and an example."""

import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import hotbed
from hotbed.cli import COMMANDS

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_current(generate):
    stale = [path.name for path, text in generate.pages().items() if not path.is_file() or path.read_text() != text]
    assert not stale, "python docs/generate.py"


def test_no_page_of_a_command_is_left_over():
    assert {page.stem for page in (ROOT / "docs" / "commands").glob("*.md")} == set(COMMANDS)


def test_the_chart_shows_what_was_measured(generate):
    chart = (ROOT / "docs" / "steps.svg").read_text()
    for title, bars in generate.measured():
        assert title in chart
        assert len(bars) >= 2, title
        assert all(f">{bar.ms:.2f}<" in chart for bar in bars)


def test_every_public_name_has_an_example():
    page = (ROOT / "docs" / "api.md").read_text()
    examples = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    absent = [name for name in hotbed.__all__ if not re.search(rf"hotbed\.{name}\b", examples)]
    assert not absent


@pytest.mark.parametrize("name", [name for name in hotbed.__all__ if callable(getattr(hotbed, name))])
def test_every_public_name_says_what_it_is(name):
    assert inspect.getdoc(getattr(hotbed, name))


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 900
