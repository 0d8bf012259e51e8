"""A forked program is as one that was started: its words, its place, its end."""

import os
import signal

import pytest

from tests.fresh import Program, run_python


def test_words_place_and_variables(tmp_path):
    code = "import os, sys; print(sys.argv[1:], os.getcwd(), os.environ['SAID']); sys.exit('told')"
    done = run_python(code, "a", 2, cwd=tmp_path, env={**os.environ, "SAID": "x"})
    assert (done.returncode, done.stdout, done.stderr) == (1, f"['a', '2'] {tmp_path} x\n", "told\n")


def test_nothing_is_left_for_the_next_program():
    first, second = (run_python("import sys; print(hasattr(sys, 'left')); sys.left = 1") for _ in range(2))
    assert first.stdout == second.stdout == "False\n"


@pytest.mark.parametrize(
    ("code", "said"), [("1 / 0", "ZeroDivisionError"), ("import no_such_module", "ModuleNotFound")]
)
def test_what_it_raises(code, said):
    done = run_python(code)
    assert done.returncode == 1
    assert said in done.stderr


def test_lines_are_read_as_they_are_written_and_a_kill_is_reported():
    program = Program("import time\nprint('here', flush=True)\ntime.sleep(1000)")
    assert program.stdout.readline() == "here\n"
    program.kill()
    assert program.ended().returncode == -signal.SIGKILL


def test_a_program_that_hangs_is_killed():
    assert Program("import time; time.sleep(1000)").ended(timeout=0.05).returncode == -signal.SIGKILL


def test_with_a_torch_for_cuda_nothing_is_trained_before_processes_are_forked():
    """Its first backward pass starts threads, and none of the forked processes could train."""
    code = """if True:
        import torch
        from benchmarks.crash import ahead
        torch.version.cuda = "13.0"
        torch.Tensor.backward = lambda *_: exit("trained")
        ahead.load_kernels()
        """
    assert run_python(code).returncode == 0
