"""The ``vime`` command: groups the subcommands and turns errors into one sentence and an exit code.

0 clean, 1 mismatch or violated invariant, 2 bad input, 3 interrupted and resumable, 141 nobody reads the output.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import click

from rlkernel.errors import RlkernelError
from vime.cli.admit import admit
from vime.cli.audit import audit
from vime.cli.check import check
from vime.cli.contract import contract
from vime.cli.doctor import doctor
from vime.cli.exits import CLOSED_PIPE, exit_code
from vime.cli.inspect import diff, provenance, report, timeline
from vime.cli.model import model
from vime.cli.reveal import reveal
from vime.cli.run import resume, run
from vime.cli.verify import verify
from vime.cli.words import counted
from vime.errors import VimeError
from vime.pipeline.problems import PipelineError


class _ReaderLeft(Exception):
    """Nobody reads the output any more (head, less): neither click nor rich is to make a failure of it."""


class _Commands(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise _ReaderLeft from error
        except SystemExit as error:  # rich ends the process
            if isinstance(error.__context__, BrokenPipeError):
                raise _ReaderLeft from error
            raise


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="vime", prog_name="vime")
def cli() -> None:
    """Reinforcement-learning post-training in which rollout engine and trainer compute the same bits.

    Exit codes: 0 clean; 1 mismatch or violated invariant; 2 bad input; 3 interrupted, can be resumed; 141 nobody
    reads the output any more.
    """


for command in (
    run,
    resume,
    check,
    report,
    provenance,
    timeline,
    diff,
    doctor,
    model,
    contract,
    reveal,
    audit,
    admit,
    verify,
):
    cli.add_command(command)


def invoke(arguments: Sequence[str]) -> int:
    """Run one command; returns its exit code. Errors that vime knows print one sentence, never a traceback."""
    try:
        result = cli.main(args=list(arguments), prog_name="vime", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return 2
    except (click.Abort, KeyboardInterrupt) as error:
        return _say("interrupted", exit_code(error))
    except PipelineError as error:
        for problem in error.problems:
            click.echo(str(problem), err=True)
        return _say(f"{counted(len(error.problems), 'problem')}; nothing was started", error.exit_code)
    except (VimeError, RlkernelError) as error:
        return _say(str(error), exit_code(error))
    except _ReaderLeft:
        return CLOSED_PIPE
    return result if isinstance(result, int) else 0


def _say(sentence: str, code: int) -> int:
    click.echo(f"vime: {sentence}".encode("utf-8", "backslashreplace"), err=True)
    return code


def main() -> None:
    """Entry point."""
    try:
        code = invoke(sys.argv[1:])
    except KeyboardInterrupt as error:  # one more, while the sentence of the first was said
        code = exit_code(error)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # what was asked for is done: the code that says so is the last word
    if code == CLOSED_PIPE:
        # what is still buffered has no reader either: Python would complain about it at exit
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
    sys.exit(code)


if __name__ == "__main__":
    main()
