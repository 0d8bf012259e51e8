"""What `hotbed serve` says when it starts: the model, the page that explains it, and a command line that works."""

import http.client
import json
import re
import shlex
import shutil
import signal
import subprocess

import pytest

from tests.fresh import HOTBED, Program
from tests.serve.conftest import GOOD, serving


@pytest.fixture(scope="module")
def started(run_folder):
    """The lines up to the last one of the start, while it serves."""
    process = Program(HOTBED, "serve", run_folder, "--port", "0", "--poll", "0")
    lines = []
    for line in process.stdout:
        lines.append(line)
        if " try: curl" in line:
            break
    yield "".join(lines)
    process.signal(signal.SIGTERM)
    process.ended()


def test_the_model_is_named(started, run_folder):
    assert re.search(rf"<Scorer of \w+ from {run_folder}/\S+ at step \d+, version \S+, \d tables", started)


def test_the_page_is_where_it_says(started):
    host, port = re.search(r"form to try it: http://(\S+):(\d+)/\n", started).groups()
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection.request("GET", "/")
    assert b"Try it" in connection.getresponse().read()
    connection.close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_command_line_scores_with_this_model(started):
    line = re.search(r"try: (curl .*)\n", started)[1]
    assert shlex.split(line)[0] == "curl"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=True, timeout=60)
    answer = json.loads(done.stdout)
    assert len(answer["scores"]) == 2
    assert all(0 < score < 1 for score in answer["scores"])
    assert f"version {answer['model']}," in started


def test_the_log_as_json(run_folder):
    with serving(run_folder, "--log-json") as server:
        assert server.score(GOOD)[0] == 200
    lines = [json.loads(line) for line in server.program.ended().stdout.splitlines()]
    assert {line["logger"] for line in lines} == {"hotbed.serve"}
    assert lines[-1]["message"] == "stopped"
    assert "try: curl" in "".join(line["message"] for line in lines)
