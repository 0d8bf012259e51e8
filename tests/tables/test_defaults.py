"""torch.set_default_dtype and torch.set_default_device are a user's own business: they change nothing in hotbed."""

import ast
from pathlib import Path

import pytest
import torch

import hotbed
from tests.pairs import pairs

PACKAGE = Path(hotbed.__file__).parent
TAKES_DEVICE = {
    "empty",
    "zeros",
    "ones",
    "full",
    "arange",
    "tensor",
    "as_tensor",
    "rand",
    "randn",
    "randint",
    "randperm",
}
TAKES_TYPE = {"empty", "zeros", "ones", "rand", "randn"}  # the others take it from their numbers
OWN = {"models", "bench"}  # weights of a dense model do follow the defaults


def without_place(text):
    """Calls that make a tensor wherever, and of whatever type, the user's defaults say."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch."):
            name, given = ast.unparse(node.func).removeprefix("torch."), {one.arg for one in node.keywords}
            if (name in TAKES_DEVICE and "device" not in given) or (name in TAKES_TYPE and "dtype" not in given):
                yield f"{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_new_tensor_says_where_and_of_what_type(path):
    if path.relative_to(PACKAGE).parts[0] not in OWN:
        assert list(without_place(path.read_text())) == []


def test_the_check_sees_a_tensor_without_a_place():
    assert list(without_place("import torch\nx = torch.empty(3, dtype=torch.int64)")) == [
        "2: torch.empty(3, dtype=torch.int64)"
    ]
    assert list(without_place("x = torch.zeros(3, device=device)"))
    assert not list(without_place("x = torch.full((3,), 1, device=device)"))


KEPT = {
    "plain": {},
    "cached": {"cache": 0.5},
    "ssd": {"memory": "400KiB"},
    "dynamic": {"hbm": "1MiB"},
}
DEFAULTS = {
    "float64": (torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16": (torch.set_default_dtype, torch.bfloat16, torch.float32),
    "meta": (torch.set_default_device, "meta", None),
}
ROWS = 2000


def tables_of(kept, folder):
    rows = None if kept == "dynamic" else ROWS
    where = KEPT[kept] | ({"ssd": f"{folder}:64MiB"} if kept == "ssd" else {})
    tables = {name: hotbed.Table(rows, 16, pooling="mean") for name in ("a", "b")}
    return hotbed.EmbeddingTables(tables, hotbed.optim.Adagrad(lr=0.1), **where)


def trained(kept, folder, ahead, batches):
    tables = tables_of(kept, folder / "rows")
    for ids in hotbed.prefetch(batches, tables) if ahead else batches:
        tables(ids).square().sum().backward()
    hotbed.checkpoint.save(folder / "saved", tables)
    again = tables_of(kept, folder / "rows again")
    hotbed.checkpoint.load(folder / "saved", again)
    return [again.rows(name)[1]["weight"].clone() for name in again.tables]


@pytest.mark.parametrize(("default", "kept", "ahead"), pairs(DEFAULTS, KEPT, [False, True]))
def test_defaults_change_no_row(default, kept, ahead, tmp_path):
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(ROWS, (300, 2), generator=generator) for _ in range(6)]
    wanted = trained(kept, tmp_path / "wanted", False, batches)
    set_default, value, usual = DEFAULTS[default]
    set_default(value)
    try:
        found = trained(kept, tmp_path / "found", ahead, batches)
    finally:
        set_default(usual)
    assert all(one.dtype == torch.float32 and torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
