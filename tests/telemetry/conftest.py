"""Runs to watch: those of the training tests."""

from tests.train.conftest import dataset, start  # noqa: F401  fixtures
