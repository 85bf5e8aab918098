"""Errors that end a command with one line on stderr and a fixed exit code."""


class DataPrepError(Exception):
    """Any failure that the user can act on: disk full, a worker that died, a lock that is held."""

    exit_code = 1


class UsageError(DataPrepError):
    """A wrong option or path, or a conflict with what the output folder already holds."""

    exit_code = 2


class DataError(DataPrepError):
    """Input that cannot be read as it claims to be, or an output that is damaged."""

    exit_code = 3
