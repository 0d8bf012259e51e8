"""The documentation site builds without a warning, holds every page, and names of the API are on it."""

import subprocess
import sys
from pathlib import Path

import pytest

import hotbed
from tests.report.browser import CHROMIUM, SILENT, Visit

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(package)
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(ROOT / "docs"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return out


def test_every_page_is_there(site):
    for page in (ROOT / "docs").rglob("*.md"):
        built = (site / page.relative_to(ROOT / "docs")).with_suffix(".html")
        assert built.is_file(), page


def test_public_names_are_described(site):
    text = (site / "api.html").read_text()
    absent = [
        name
        for name in hotbed.__all__
        if f'id="hotbed.{name}"' not in text and f'id="module-hotbed.{name}"' not in text
    ]
    assert not absent


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_it_opens_without_errors_and_everyone_can_use_it(site):
    playwright = pytest.importorskip("playwright.sync_api")
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    options = {"resultTypes": ["violations"], "preload": False}  # preloading asks for files by XMLHttpRequest
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=SILENT)
        for name in ("index", "commands/train", "cookbook", "api"):
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            seen = Visit(page)
            page.goto((site / f"{name}.html").as_uri())
            found = axe.Axe().run(page, options=options).response["violations"]
            assert [(one["id"], one["nodes"][0]["html"]) for one in found] == [], name
            assert seen.errors == [], name
            assert seen.is_as_wide_as_its_window(), name
            page.close()
        browser.close()
