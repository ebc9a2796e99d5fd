"""The ``vime`` command: groups the subcommands and turns errors into one sentence and an exit code.

0 clean, 1 mismatch or violated invariant, 2 bad input, 3 interrupted and resumable.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from rlkernel.errors import NumericsError, RlkernelError
from vime.cli.admit import admit
from vime.cli.audit import audit
from vime.cli.check import check
from vime.cli.contract import contract
from vime.cli.doctor import doctor
from vime.cli.inspect import diff, provenance, report, timeline
from vime.cli.model import model
from vime.cli.reveal import reveal
from vime.cli.run import resume, run
from vime.cli.verify import verify
from vime.errors import VimeError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="vime", prog_name="vime")
def cli() -> None:
    """Reinforcement-learning post-training in which rollout engine and trainer compute the same bits.

    Exit codes: 0 clean; 1 mismatch or violated invariant; 2 bad input; 3 interrupted, can be resumed.
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
    except click.Abort:
        return _say("interrupted", 3)
    except KeyboardInterrupt:
        return _say("interrupted", 3)
    except VimeError as error:
        return _say(str(error), error.exit_code)
    except NumericsError as error:
        return _say(str(error), 1)
    except RlkernelError as error:
        return _say(str(error), 2)
    except BrokenPipeError:
        # The reader (less, head) closed the pipe: not an error; keep Python from complaining at exit.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 0
    return result if isinstance(result, int) else 0


def _say(sentence: str, code: int) -> int:
    click.echo(f"vime: {sentence}", err=True)
    return code


def main() -> None:
    """Entry point."""
    sys.exit(invoke(sys.argv[1:]))


if __name__ == "__main__":
    main()
