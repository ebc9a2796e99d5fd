"""Exit codes: 0 clean, 1 mismatch or violated invariant, 2 bad input, 3 interrupted and resumable."""

from __future__ import annotations

import click

from rlkernel.errors import NumericsError, RlkernelError
from vime.errors import VimeError

CLOSED_PIPE = 141
"""128 + SIGPIPE, as any Unix tool: the reader left before the end, so that a code about the run would be a guess."""


def exit_code(error: BaseException) -> int:
    """The code that an error ends a command with; 1, as Python's own, for one that nobody foresaw."""
    if isinstance(error, VimeError):
        return error.exit_code
    if isinstance(error, NumericsError):
        return 1
    if isinstance(error, (RlkernelError, click.ClickException)):
        return 2
    return 3 if isinstance(error, (KeyboardInterrupt, click.Abort)) else 1
