import pytest


@pytest.fixture(autouse=True)
def _threads(two_threads):
    """Kernels divide their work among threads."""
