"""The documentation is true: its Python and console blocks run, its links lead somewhere, its commands exist.

Blocks of one page run in order, in one folder. A block that cannot run here says why in the line before it:

    <!-- not run: needs a GPU -->
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.fresh import run_python

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
_BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^\n]+?) -->\n)?```(?P<kind>python|console)\n(?P<text>.*?)```", re.DOTALL
)


class Block(NamedTuple):
    """A piece of code on a page."""

    kind: str
    text: str
    reason: str | None  # why it does not run


def blocks_of(page):
    return [Block(found["kind"], found["text"], found["reason"]) for found in _BLOCK.finditer(page.read_text())]


def commands_of(block):
    """Lines after `$ ` where there are such, else all: the rest is output."""
    lines = block.text.splitlines()
    typed = [line[2:] for line in lines if line.startswith("$ ")]
    return typed or lines


HOTBED = "import sys; from hotbed.cli import main; main(sys.argv[1:])"


def plain_words(command):
    """What follows `hotbed` in a command that needs no shell; None where it is another one."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = list(lexer)
    needs_shell = set(command) & set("$`*?~\\") or any(not set(word) - set("();<>|&") for word in words)
    return None if needs_shell or words[:1] != ["hotbed"] else words[1:]


def run_commands(commands, environment):
    """As a shell does, until one fails."""
    plain = [plain_words(command) for command in commands]
    if None in plain:
        shell = ["bash", "-c", "\n".join(["set -e", *commands])]
        return subprocess.run(shell, env=environment, capture_output=True, text=True, timeout=300, check=False)
    for words in plain:
        done = run_python(HOTBED, *words, env=environment)
        if done.returncode:
            break
    return done


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    threads = {"OMP_NUM_THREADS": "1", "HOTBED_LOG": "quiet"}
    environment = {**os.environ, **threads, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for number, block in enumerate(blocks_of(page)):
        if block.reason is not None:
            continue
        if block.kind == "python":
            exec(compile(block.text, f"{page.name} block {number}", "exec"), names)
            continue
        done = run_commands(commands_of(block), environment)
        how = "Mend it, or say why it cannot run here: <!-- not run: REASON --> in the line before the block."
        assert done.returncode == 0, f"{page.name} block {number}: {block.text}\n{done.stdout}{done.stderr}\n{how}"


def test_a_block_with_a_reason_is_not_run_and_others_are():
    page = "<!-- not run: needs a GPU -->\n```console\nrm x\n```\ntext\n```python\n1\n```\n```console\n$ ls\nx y\n```\n"
    found = [Block(match["kind"], match["text"], match["reason"]) for match in _BLOCK.finditer(page)]
    assert found == [
        Block("console", "rm x\n", "needs a GPU"),
        Block("python", "1\n", None),
        Block("console", "$ ls\nx y\n", None),
    ]
    assert commands_of(found[2]) == ["ls"]


def test_commands_that_need_a_shell_have_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert plain_words("hotbed train --multi 'a:|' --out x  # a word") == ["train", "--multi", "a:|", "--out", "x"]
    for command in ("hotbed top x | head", "hotbed top x > y", "hotbed top $x", "ls", "hotbed --help; ls"):
        assert plain_words(command) is None
    assert run_commands(["x=1", "echo $x"], os.environ).stdout == "1\n"
    assert run_commands(["false", "echo 1"], os.environ).returncode == 1
    failed = run_commands(["hotbed top nothing", "hotbed --version"], os.environ)
    assert failed.returncode == 1
    assert "nothing" in failed.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("https://", "http://")):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page):
    """Every `hotbed X --option` in a console block, indented, or in a line of text is a command with that option."""
    import typer.main

    from hotbed.cli import build_app

    commands = typer.main.get_command(build_app([]))
    shown = [block.text for block in blocks_of(page) if block.kind == "console"]
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    inline = [" ".join(code.split()) for code in re.findall(r"`(hotbed [a-z][^`]*)`", prose)]
    typed = "\n".join([*shown, *inline, *re.findall(r"^    .+$", page.read_text(), re.MULTILINE)])
    for line in re.findall(r"^\s*(?:\$ )?hotbed (.+)$", typed, re.MULTILINE):
        words = line.split("#")[0].split()
        command = commands
        while words and hasattr(command, "commands"):
            name = words.pop(0)
            loaded = typer.main.get_command(build_app([name])) if command is commands else command
            assert name in loaded.commands, line
            command = loaded.commands[name]
        known = {one for parameter in command.params for one in (*parameter.opts, *parameter.secondary_opts)}
        for word in words:
            if word.startswith("--"):
                assert word.split("=")[0] in known, f"{word} in {line}"


def test_the_picture_of_the_architecture_names_files_that_exist():
    """Bar of the page: from the picture alone a reader finds the file of each step."""
    picture = (ROOT / "docs" / "life-of-a-batch.svg").read_text()
    named = [name for text in re.findall(r'class="file"[^>]*>([^<]+)<', picture) for name in text.split(", ")]
    assert len(named) > 15
    assert not [name for name in named if not (ROOT / "hotbed" / name).exists()]


def test_the_architecture_page_names_functions_that_exist():
    """The table of questions: `Class.function` in [file](link)."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.split("| question |", 1)[1].split("\n\n", 1)[0]
    named = re.findall(r"`([\w.]+)` in \[[^]]+\]\(\.\./([^)]+)\)", table)
    assert len(named) > 7
    for name, path in named:
        text = (ROOT / path).read_text()
        assert all(re.search(rf"(def|class) {part}\b", text) for part in name.split(".")), f"{name} in {path}"


def test_the_architecture_page_has_every_room_and_floor():
    from tests.test_imports import FLOORS

    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = [set(re.findall(r"`(\w+)`", row)) for row in re.findall(r"^\| \d+ \| (`.+) \|$", page, re.MULTILINE)]
    assert rows[::-1] == FLOORS
    tree = page.split("hotbed/\n", 1)[1].split("```")[0]
    rooms = {room for floor in FLOORS for room in floor} - {"__main__"}
    assert rooms == set(
        re.findall(r"(?<=[ \n])(\w+)(?:/|\.py)", re.sub(r" {4,}\w+/.*| {3,}\S.*$", "", tree, flags=re.MULTILINE))
    )
