import os
import subprocess
import sys
from pathlib import Path

import pytest

import hotbed as package
from hotbed.cli import COMMANDS


def test_help_lists_every_command(hotbed):
    result = hotbed("--help")
    assert result.code == 0
    for name, entry in COMMANDS.items():
        assert name in result.out
        assert entry.summary in result.out


def test_no_arguments_is_help(hotbed):
    result = hotbed()
    assert "Usage: hotbed" in result.out + result.err


@pytest.mark.parametrize("command", ["plan --calibrate no --no-curve", "simulate --cache 0.5,0.9 --batch-size 256"])
def test_the_default_data_is_that_of_train(hotbed, monkeypatch, command):
    monkeypatch.setattr("hotbed.data.embedded.TRAIN_ROWS", 3000)
    plain, named = hotbed(*command.split()), hotbed(*command.split(), "criteo-like:3000")
    assert plain.code == 0, plain.err
    assert "16,522" in plain.out
    assert plain.out.split() == named.out.replace("criteo-like:3000", "criteo-like").split()


def test_version(hotbed):
    assert hotbed("--version").out == f"hotbed {package.__version__}\n"


def test_a_mistyped_command_gets_a_hint(hotbed):
    result = hotbed("trian")
    assert result.code == 2
    assert "Did you mean 'train'" in result.err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(hotbed, name):
    result = hotbed(name, "--help")
    assert result.code == 0
    assert f"Usage: hotbed {name}" in result.out


@pytest.mark.parametrize("name", ["train", "evaluate", "predict"])
def test_help_teaches_by_example(hotbed, name):
    assert f"hotbed {name} runs/" in hotbed(name, "--help").out or name == "train"
    assert "For example" in hotbed(name, "--help").out


def test_an_unknown_option_is_told(hotbed):
    result = hotbed("train", "--epoch", "3")
    assert result.code == 2
    assert "--epoch" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize("command", [[sys.executable, "-m", "hotbed"], [Path(sys.executable).with_name("hotbed")]])
def test_ways_to_start_it(command):
    if not Path(command[0]).exists():
        pytest.skip("hotbed is not installed here")
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == f"hotbed {package.__version__}\n"


def test_an_interrupt_is_no_traceback(hotbed, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("hotbed.cli.train.read_config", interrupted)
    result = hotbed("train")
    assert result.code == 130
    assert "Traceback" not in result.err


@pytest.mark.parametrize(("given", "found"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_waiting_threads_sleep_unless_told_otherwise(hotbed, monkeypatch, given, found):
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    else:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    hotbed("--version")
    assert os.environ["OMP_WAIT_POLICY"] == found


def run_hotbed(*arguments, **options):
    return subprocess.run([sys.executable, "-m", "hotbed", *arguments], timeout=120, check=False, **options)


def test_a_terminal_that_knows_only_ascii():
    done = run_hotbed("data", "list", capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert b"criteo-like" in done.stdout


def test_a_closed_stderr_ends_nothing():
    """A run whose log is piped into `head` goes on."""
    reader, writer = os.pipe()
    os.close(reader)
    code = "from hotbed.cli.console import err; err().print('x' * 99999); err().print('y'); print('still here')"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=writer, timeout=120, check=False)
    os.close(writer)
    assert done.stdout == b"still here\n"
