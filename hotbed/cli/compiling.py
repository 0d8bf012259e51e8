"""A line when kernels are compiled, so that nobody takes a first use for one that hangs, or its seconds for a speed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hotbed.cli.console import aside

if TYPE_CHECKING:
    from hotbed.host.compiling import Compiled

BEGINS = "compiling kernels for this machine, only this once: it may take a minute"
_NOTICED = 2.0  # seconds after which somebody wonders
_TOLD = 1.0  # seconds worth a word at the end


@contextmanager
def told_of_compiling(quiet: bool = False) -> Iterator[Compiled]:
    """Inside, kernels that have been compiled for some seconds lead to a line on the screen."""
    from hotbed.host.compiling import compiled_within

    with compiled_within(lambda: None if quiet else aside(BEGINS), _NOTICED) as compiled:
        yield compiled


def compiled_text(compiled: Compiled) -> str:
    """How long it took; "" where nothing was compiled, or hardly anything."""
    if compiled.seconds <= _TOLD:
        return ""
    return f"{compiled.kernels:,} kernels were compiled in {compiled.seconds:,.1f} s, once; no speed here counts it"
