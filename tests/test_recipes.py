"""examples/slurm.sbatch and kubernetes.yaml start commands that hotbed has; docs/clusters.md says what was run."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from hotbed.cli.describe import describe_commands

EXAMPLES = Path(__file__).parents[1] / "examples"


def commands(text):
    """The words after `-m hotbed`, until the line ends."""
    joined = text.replace("\\\n", " ")
    return [shlex.split(found) for found in re.findall(r"-m hotbed ([^|\n]+)", joined)]


def pods():
    return list(yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()))


def of_the_job():
    [container] = pods()[1]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["torchrun"]
    return shlex.join(container["args"])


@pytest.mark.parametrize(
    "text",
    [
        (EXAMPLES / "slurm.sbatch").read_text(),
        of_the_job(),
        (EXAMPLES.parent / "docs" / "clusters.md").read_text(),
    ],
    ids=["slurm", "kubernetes", "page"],
)
def test_their_commands_exist(text):
    [train] = [command for command in describe_commands() if command.name == "train"]
    known = {parameter.name for parameter in train.parameters}
    found = commands(text)
    assert found
    for name, *words in found:
        assert name == "train"
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= known
        assert given >= {"--data", "--out", "--auto-resume", "--checkpoint-every"}


def test_pods_are_as_many_as_nodes_and_find_each_other():
    service, job = pods()
    spec, template = job["spec"], job["spec"]["template"]
    arguments = dict(word.removeprefix("--").split("=") for word in shlex.split(of_the_job()) if "=" in word)
    assert spec["completions"] == spec["parallelism"] == int(arguments["nnodes"])
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    name = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert template["spec"]["subdomain"] == service["metadata"]["name"]
    assert arguments["rdzv-endpoint"] == f"{name}:29500"
    [container] = template["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(arguments["nproc-per-node"])
    assert template["spec"]["terminationGracePeriodSeconds"] > int(container["env"][0]["value"])


def test_the_manifest_has_the_form_that_kubernetes_asks_for():
    validate = pytest.importorskip("kubernetes_validate").validate
    for one in pods():
        assert validate(one, "1.31", strict=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_script_is_one():
    assert subprocess.run(["bash", "-n", EXAMPLES / "slurm.sbatch"], check=False).returncode == 0
