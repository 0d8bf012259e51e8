"""Every error hotbed raises on purpose.

    HotbedError
    ├── ConfigError      a setting is wrong or two settings contradict each other (all mistakes in one message)
    ├── DataError        the input data is not what it claims to be
    │   ├── FormatError  a raw file cannot be parsed, or too many of its rows are bad
    │   └── SchemaError  a dataset directory or schema does not fit what is asked of it
    ├── BudgetError      a batch needs more rows at once than the cache has slots
    ├── IdError          an id lies outside its table; names table, feature, sample and id
    ├── ShapeError       tensors of the wrong shape or type reach a table or a model
    ├── ModelError       a model of the user's own fails, or is code that nobody here has allowed to run
    ├── RunError         a run directory cannot be written, resumed or read
    ├── RemoteError      an object store refuses, does not answer, or has no such bucket; also an OSError
    ├── StoreError       rows cannot be kept or read back: a full disk, damaged or missing files
    └── RankError        another rank stopped, or requests something different from this one

A message says what happened, what was given, the limit, and the way out. The command line prints the message alone;
a traceback means a bug in hotbed. Its exit codes: docs/commands.md.
"""

import errno
from enum import IntEnum
from typing import TypeVar

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
E = TypeVar("E", bound="HotbedError")


class ExitCode(IntEnum):
    """How a command ends when it does not succeed."""

    FAILURE = 1
    USAGE = 2  # a wrong option or setting
    DOES_NOT_FIT = 3  # in memory, on a disk, or under a cap
    INTERRUPTED = 130  # SIGINT
    TERMINATED = 143  # SIGTERM


class HotbedError(Exception):
    """Base class of all errors that a user can cause and correct."""

    exit_code = ExitCode.FAILURE


class ConfigError(HotbedError):
    """One or more settings are wrong; the message lists all of them."""

    exit_code = ExitCode.USAGE


class DataError(HotbedError):
    """The input data is not what it claims to be."""


class FormatError(DataError):
    """A raw file cannot be parsed, or too many of its rows are bad."""


class SchemaError(DataError):
    """A dataset directory or schema does not fit what is asked of it."""


class BudgetError(HotbedError):
    """A batch needs more rows at once than the cache has slots; `num_slots` would be enough."""

    exit_code = ExitCode.DOES_NOT_FIT

    def __init__(self, message: str, num_slots: int = 0) -> None:
        super().__init__(message)
        self.num_slots = num_slots


class IdError(HotbedError, IndexError):
    """An id lies outside its table."""


class ShapeError(HotbedError, ValueError):
    """Tensors of the wrong shape or type reach a table or a model."""


class ModelError(HotbedError):
    """A model of the user's own fails; the message begins with the line of its file."""


class RunError(HotbedError):
    """A run directory cannot be written, resumed or read."""


class RemoteError(HotbedError, OSError):
    """An object store refuses, does not answer, or has no such bucket."""


class StoreError(HotbedError):
    """Rows cannot be kept or read back: a full disk, damaged or missing files."""


class RankError(HotbedError):
    """Another rank stopped, or asks for something else than this one."""


def without_room(kind: type[E], message: str) -> E:
    """An error of this kind about something that does not fit in memory, on a disk or under a cap."""
    error = kind(message)
    error.exit_code = ExitCode.DOES_NOT_FIT
    return error


def exit_code_of(error: BaseException) -> ExitCode:
    """The exit code for an error, or for the cause that it names."""
    found: BaseException | None = error
    while found is not None:
        is_full = isinstance(found, OSError) and found.errno in DISK_FULL
        if is_full or isinstance(found, MemoryError) or type(found).__name__ == "OutOfMemoryError":  # torch's
            return ExitCode.DOES_NOT_FIT
        if isinstance(found, KeyboardInterrupt):
            return ExitCode.INTERRUPTED
        if isinstance(found, HotbedError) and found.exit_code != ExitCode.FAILURE:
            return found.exit_code
        found = found.__cause__
    return ExitCode.FAILURE


def reason_of(error: BaseException) -> str:
    """The first line of an exception's message; its class if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
