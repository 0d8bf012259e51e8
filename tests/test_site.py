"""The documentation site builds without a warning, holds every page, and names of the API are on it."""

import subprocess
import sys
from pathlib import Path

import pytest

import hotbed

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
