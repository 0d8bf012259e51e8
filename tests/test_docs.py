"""The documentation is true: its Python blocks run, its links lead somewhere, its commands exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)):
        exec(compile(block, f"{page.name} block {number}", "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("https://", "http://")):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page):
    """Every `hotbed X --option` in a console block is a command with that option."""
    import typer.main

    from hotbed.cli import build_app

    commands = typer.main.get_command(build_app([]))
    for line in re.findall(r"^\s*(?:\$ )?hotbed (.+)$", page.read_text(), re.MULTILINE):
        words = line.split("#")[0].split()
        command = commands
        while words and hasattr(command, "commands"):
            name = words.pop(0)
            loaded = typer.main.get_command(build_app([name])) if command is commands else command
            assert name in loaded.commands, line
            command = loaded.commands[name]
        known = {option for parameter in command.params for option in parameter.opts}
        for word in words:
            if word.startswith("--"):
                assert word.split("=")[0] in known, f"{word} in {line}"
