"""Every error hotbed raises on purpose.

    HotbedError
    ├── ConfigError      a setting is wrong or two settings contradict each other (all mistakes in one message)
    ├── DataError        the input data is not what it claims to be
    │   ├── FormatError  a raw file cannot be parsed, or too many of its rows are bad
    │   └── SchemaError  a dataset directory or schema does not fit what is asked of it
    ├── BudgetError      a batch needs more rows at once than the cache has slots
    ├── IdError          an id lies outside its table; names table, feature, sample and id
    ├── ShapeError       tensors of the wrong shape or type reach a table or a model
    ├── ModelError       a model of the user's own fails, or is code that nobody here has said to run
    ├── RunError         a run directory cannot be written, resumed or read
    ├── RemoteError      an object store refuses, does not answer, or has no such bucket; also an OSError
    ├── StoreError       rows cannot be kept or read back: a full disk, damaged or missing files
    └── RankError        another rank stopped, or asks for something else than this one

A message says what happened, what was given, the limit, and the way out. The command line prints the message alone;
a traceback means a bug in hotbed.
"""


class HotbedError(Exception):
    """Base class of all errors that a user can cause and correct."""


class ConfigError(HotbedError):
    """One or more settings are wrong; the message lists all of them."""


class DataError(HotbedError):
    """The input data is not what it claims to be."""


class FormatError(DataError):
    """A raw file cannot be parsed, or too many of its rows are bad."""


class SchemaError(DataError):
    """A dataset directory or schema does not fit what is asked of it."""


class BudgetError(HotbedError):
    """A batch needs more rows at once than the cache has slots; `num_slots` would be enough."""

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
