"""Errors that a user can act on. Each carries the exit code that a command ends with."""


class StackError(Exception):
    """A failure whose message is one line that says what is wrong and what to do."""

    exit_code = 1


class ConfigError(StackError):
    """An option or a combination of options that cannot work."""

    exit_code = 2


class DataError(StackError):
    """A file that is missing, damaged or not what it says it is."""

    exit_code = 3


class PeerError(StackError):
    """Another process of the run died, hangs, or cannot be reached."""


class TrainingError(StackError):
    """Training cannot go on, for example because a gradient is not finite."""
