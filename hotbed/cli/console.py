"""Where the command line writes: results to stdout, errors and progress to stderr."""

from __future__ import annotations

from rich.console import Console


def out() -> Console:
    """Results. Made on each call, so that it follows a redirected stdout."""
    return Console(highlight=False)


def err() -> Console:
    """Errors and progress."""
    return Console(stderr=True, highlight=False)


def fail(message: str, code: int = 2) -> int:
    """Print `error: message` as plain text, unwrapped, and hand back the exit code."""
    console = err()
    console.print("error:", style="bold red", end=" ")
    console.print(message, markup=False, soft_wrap=True)
    return code
