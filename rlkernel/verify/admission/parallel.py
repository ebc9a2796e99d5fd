"""Admission of several regions at the same time, each in a process of its own.

Comparing on a GPU is waiting for a compiler, region by region: processes wait side by side. Each admits one region and
keeps its certificate before it answers, so that what was compared is not lost if another region is refused.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread
from typing import Any

from rlkernel.contract.build import Contract
from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.threads import Workers, available_cpus
from rlkernel.verify.admission.admit import admit, groups
from rlkernel.verify.admission.budget import Budget
from rlkernel.verify.admission.certificate import AdmissionRefused, Certificate, certificate_from_json

MOST = 16
_SPLIT = ("logprob", "attention")
_LONG = (*_SPLIT, "qkv_proj", "gate_up_proj", "down_proj", "o_proj")  # these start first


@dataclass(frozen=True)
class Pending:
    """One region to compare: all of it can be sent to another process."""

    region: str
    op: Any
    cases: tuple[str, ...]

    @property
    def what(self) -> str:
        """In words."""
        return f"{self.op.implementation} for {self.region}"

    @property
    def key(self) -> tuple[str, tuple[str, ...]]:
        """What a certificate of it is for."""
        return self.region, self.cases


def shares(region: str, cases: tuple[str, ...], contract: Contract) -> list[tuple[str, ...]]:
    """Cases that one process compares: of the regions that take longest, those that share an entry, else all."""
    return groups(region, cases, contract) if region in _SPLIT else [cases]


def processes_here() -> int:
    """As many as there are processors, at most 16; one in a process that may have no children."""
    return 1 if multiprocessing.current_process().daemon else min(available_cpus(), MOST)


def admit_in_processes(
    pending: Sequence[Pending],
    contract: Contract,
    target: str,
    budget: Budget,
    keep: Path,
    processes: int,
    say: Callable[[str], None],
) -> tuple[list[Certificate], list[str]]:
    """Compare every region, ``processes`` at a time; returns certificates in the order given, and notes.

    Args:
        keep: the folder into which each process writes its certificate; where it cannot, a note says so.
        say: gets a sentence whenever a region is done.

    Raises:
        AdmissionRefused: as the process raised it; the others are ended, and what they kept stays.
        ContractError: a process failed or died before it had a result.
    """
    started = time.monotonic()
    first = {region: place for place, region in enumerate(_LONG)}
    waiting = deque(sorted(pending, key=lambda item: first.get(item.region, len(first))))
    found: dict[tuple[str, tuple[str, ...]], Certificate] = {}
    notes: list[str] = []
    with _children() as running:
        while waiting or running:
            while waiting and len(running) < processes:
                _start(running, waiting.popleft(), contract, target, budget, keep)
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)
                process, item = running[connection]
                certificate, note = _result(connection, process, item)
                process.join()
                del running[connection]
                found[item.key] = certificate
                notes += [note] if note else []
                say(
                    f"{len(found)} of {len(pending)} compared after {time.monotonic() - started:.0f} s: {item.what}, "
                    f"{certificate.outputs:,} outputs, none differs"
                )
    return [found[item.key] for item in pending], notes


_Running = dict[Connection, tuple[Any, Pending]]


@contextmanager
def _children() -> Iterator[_Running]:
    """Processes by the end of their pipe; those that are left are ended."""
    running: _Running = {}
    try:
        yield running
    finally:
        for process, _ in running.values():
            process.terminate()
        for connection, (process, _) in running.items():
            process.join()
            connection.close()


def _start(running: _Running, item: Pending, contract: Contract, target: str, budget: Budget, keep: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=_admit_one, args=(theirs, item, contract, target, budget, keep), name=f"admission of {item.region}"
    )
    process.start()
    theirs.close()
    running[ours] = process, item


def _admit_one(
    connection: Connection, item: Pending, contract: Contract, target: str, budget: Budget, keep: Path
) -> None:
    """In the process: admit one region, keep its certificate, answer with plain data."""
    from rlkernel.verify.admission.store import write_certificates

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches every process of a terminal: the parent speaks
    Thread(target=_end_with_parent, daemon=True).start()
    try:
        certificate = admit(item.op, item.region, item.cases, contract, target, budget, workers=Workers(1))
        note = ""
        try:
            write_certificates([certificate], keep)
        except OSError as error:
            note = f"certificates cannot be kept, so that the next run compares again: {error}"
        answer = {"certificate": certificate.as_json(), "note": note}
    except AdmissionRefused as refused:
        answer = {"refused": str(refused), "report": refused.report}
    except Exception as error:
        traceback.print_exc()
        answer = {"failed": f"{type(error).__name__}: {error}"}
    connection.send(answer)
    connection.close()


def _end_with_parent() -> None:
    """Whoever kills the parent has no use for what this process makes."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _result(connection: Connection, process: Any, item: Pending) -> tuple[Certificate, str]:
    """What a process answered. Raises what :func:`admit_in_processes` does."""
    try:
        answer = connection.recv()
    except EOFError:
        process.join()
        raise ContractError(
            f"admission of {item.what}: its process ended with exit code {process.exitcode} before it had a result"
        ) from None
    finally:
        connection.close()
    if "refused" in answer:
        raise AdmissionRefused(answer["refused"], answer["report"])
    if "failed" in answer:
        raise ContractError(f"admission of {item.what} failed: {answer['failed']}")
    return certificate_from_json(answer["certificate"]), answer["note"]
