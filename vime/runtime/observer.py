"""What a run loop tells whoever watches it, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

RunStatus = Literal["completed", "mismatch", "interrupted"]
EXIT_CODES: Mapping[RunStatus, int] = {"completed": 0, "mismatch": 1, "interrupted": 3}


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended.

    ``reports`` are the per-step reports of the whole run (those before a resume included), ``evaluations`` the
    held-out means as ``{step, reward_mean, ...}`` in order; ``seconds`` is the wall time of this call. Of the ``steps``
    that are done, this call read ``recalled`` from the log, computed ``repeated`` again with the result that the log
    has, and ran the others. ``mismatch`` means that some compared token or distribution differed, whether or not the
    run went on.
    """

    status: RunStatus
    run_directory: Path
    steps: int
    reports: tuple[Mapping[str, Any], ...] = ()
    evaluations: tuple[Mapping[str, Any], ...] = ()
    seconds: float = 0.0
    manifest_digest: str = ""
    message: str = ""
    recalled: int = 0
    repeated: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """Exit code of the command line."""
        return EXIT_CODES[self.status]


class Observer(Protocol):
    """Watches a run. Nothing that an observer does can change a bit; it may ask the run to stop.

    Reports and evaluations come with ``repeated``: whether the log of a resumed run held them already, so that they
    were computed again and are what was logged (clock times included: those are the first execution's).
    """

    def started(self, run_directory: Path, first_step: int, steps: int) -> None:
        """The run is about to do ``first_step`` .. ``steps`` - 1."""

    def step_started(self, step: int) -> None: ...

    def stage(self, name: str) -> None:
        """A stage of the step begins (``rollout``, ``reward``, ``score``, ``train``, ``sync``, ``evaluate``, ...)."""

    def progress(self, done: int, total: int) -> None:
        """Within the stage: samples finished so far."""

    def step_finished(self, report: Mapping[str, Any]) -> None:
        """The step's report, as in ``steps.jsonl``."""

    def evaluated(self, evaluation: Mapping[str, Any]) -> None:
        """A held-out evaluation: ``{step, reward_mean, ...}``."""

    def finished(self, outcome: RunOutcome) -> None: ...

    def stop_requested(self) -> bool:
        """Whether the run should stop at its next safe place and stay resumable."""


class Silent:
    """An observer that shows nothing and never stops a run."""

    def started(self, run_directory: Path, first_step: int, steps: int) -> None: ...

    def step_started(self, step: int) -> None: ...

    def stage(self, name: str) -> None: ...

    def progress(self, done: int, total: int) -> None: ...

    def step_finished(self, report: Mapping[str, Any]) -> None: ...

    def evaluated(self, evaluation: Mapping[str, Any]) -> None: ...

    def finished(self, outcome: RunOutcome) -> None: ...

    def stop_requested(self) -> bool:
        """Never."""
        return False
