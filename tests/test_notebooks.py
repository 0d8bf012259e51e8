"""The notebooks run from top to bottom, and are kept without outputs: those hold the paths of the machine that made them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fresh import run_python

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# In a process of its own: kernels are started with asyncio and sockets, whose warnings are not ours to mend.
RUN = """
import sys, tempfile, nbformat
from nbclient import NotebookClient
from traitlets.config import Config
config, notebook = Config(), nbformat.read(sys.argv[1], as_version=4)
where = {"metadata": {"path": sys.argv[2]}}
with tempfile.TemporaryDirectory() as folder:  # of sockets: a port that was free may be taken when the kernel has started
    config.KernelManager.update(transport="ipc", ip=f"{folder}/kernel")
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources=where, config=config).execute()
"""
# Without a kernel, and every `python -m hotbed` a fork: importing torch for each takes most of the time.
RUN_WITH_COMMANDS = """
import json, os, shlex, subprocess, sys, tempfile
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config
from hotbed.cli import main

run = subprocess.run

def in_a_fork(words, *others, **options):
    if list(words[:3]) != [sys.executable, "-m", "hotbed"]:
        return run(words, *others, **options)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            code = 1
            try:
                main(list(words[3:]))
            except SystemExit as end:
                code = end.code or 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), err.read())

class Shell(InteractiveShell):
    def system(self, command):
        done = in_a_fork(shlex.split(self.var_expand(command, depth=1)))
        print(done.stdout, done.stderr)
        assert done.returncode == 0, done.stderr

config = Config()
config.HistoryManager.enabled = False  # it has a thread
shell = Shell.instance(config=config)
subprocess.run = in_a_fork
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code" and not shell.run_cell("".join(cell["source"])).success:
        sys.exit(1)
"""


def test_there_are_three():
    assert len(NOTEBOOKS) == 3


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_has_no_outputs(notebook):
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(notebook, tmp_path):
    for package in ("nbclient", "nbformat", "ipykernel"):
        pytest.importorskip(package)
    if "sys.executable" in notebook.read_text():
        done = run_python(RUN_WITH_COMMANDS, notebook, cwd=tmp_path)
    else:
        command = [sys.executable, "-c", RUN, str(notebook), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
