"""The exceptions of vime. Each message names the value, the place and what would be accepted."""


class VimeError(Exception):
    """Base of every error that vime raises on purpose. ``exit_code`` is that of the command line."""

    exit_code = 2


class InputError(VimeError):
    """Bad input: a pipeline, file, data set, checkpoint or user function. Exit code 2."""


class InvariantViolation(VimeError):
    """An invariant of the timeline, or bit-equality itself, was broken. Exit code 1."""

    exit_code = 1


class Interrupted(VimeError):
    """The run stopped and can be resumed (full disk, signal, failing user function). Exit code 3."""

    exit_code = 3


ERRORS: dict[str, type[VimeError]] = {error.__name__: error for error in (InputError, InvariantViolation, Interrupted)}
"""By name, for those that another process reports."""
