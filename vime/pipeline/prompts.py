"""The rows of the data source: called, every row looked at, those of the run rendered, train and eval kept apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlkernel.errors import RlkernelError
from vime.errors import InputError, VimeError
from vime.pipeline.functions import UserFunction, raised_in
from vime.pipeline.loading import LoadedPipeline
from vime.pipeline.model import ResolvedModel
from vime.pipeline.problems import Problem
from vime.pipeline.schema import MissingValue, value_at
from vime.tasks.prompts import PromptSet, name_row, prompt_content
from vime.types import NAMESPACES, Namespace

_SHOWN = 3


@dataclass(frozen=True)
class PromptSets:
    """``longest`` is the longest prompt of the run in tokens, 0 where none could be rendered."""

    train: PromptSet | None = None
    evaluation: PromptSet | None = None
    longest: int = 0


def call_source(loaded: LoadedPipeline, source: UserFunction, problems: list[Problem]) -> dict[Namespace, Any]:
    """Call the data source for every namespace that is used; training rows as far as ``data.train_prompts`` goes."""
    rows: dict[Namespace, Any] = {}
    for namespace in NAMESPACES:
        if namespace == "eval" and not _known(loaded, "stages.evaluate.prompts", 0):
            continue
        try:
            made = source.call(namespace)
        except (VimeError, RlkernelError) as error:
            key = "data.parameters" if _known(loaded, "data.parameters", None) else "data"
            problems.append(loaded.problem(key, f"the data source {source.name!r} fails: {error}"))
            continue
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a user's function may raise anything
            message = f"the data source {source.name!r} raised {type(error).__name__} for {namespace!r}: {error}"
            message += raised_in(error, source.call)
            problems.append(loaded.problem("data.source", message))
            continue
        if not (hasattr(made, "__len__") and hasattr(made, "__getitem__")) or isinstance(made, str | bytes | Mapping):
            message = f"the data source {source.name!r} returned a {type(made).__name__}; a sequence of rows is needed"
            problems.append(loaded.problem("data.source", message))
            continue
        if not len(made):
            message = f"the data source has no {namespace} rows: at least one is needed"
            if namespace == "eval":
                message += ", or no evaluation (stages.evaluate.prompts: 0)"
            problems.append(loaded.problem("data.source", message))
            continue
        limit = _known(loaded, "data.train_prompts", None) if namespace == "train" else None
        if limit is not None and limit > len(made):
            message = f"{limit} are asked for; the data source has {len(made)} training rows"
            problems.append(loaded.problem("data.train_prompts", message))
        rows[namespace] = made if limit is None else made[:limit]
    return rows


def check_rows(
    loaded: LoadedPipeline, rows: Mapping[Namespace, Any], problems: list[Problem]
) -> dict[Namespace, set[int]]:
    """Look at every row, drawn or not: its form, and whether a held-out prompt is a training prompt too.

    Returns the numbers of the rows that are of no use, by namespace.
    """
    held: dict[Any, int] = {}
    useless: dict[Namespace, set[int]] = {}
    for namespace in ("eval", "train"):
        common: list[tuple[int, int]] = []
        contents = _contents(loaded, rows, namespace, problems)
        useless[namespace] = set(range(len(rows.get(namespace, ())))) - {number for number, _ in contents}
        for number, content in contents:
            if namespace == "eval":
                held.setdefault(content, number)
            elif content in held:
                common.append((held[content], number))
        if common:
            pairs = "; ".join(
                f"{name_row(rows['eval'], 'eval', one)} and {name_row(rows['train'], 'train', other)}"
                for one, other in common[:_SHOWN]
            )
            more = f"; and {len(common) - _SHOWN} more" if len(common) > _SHOWN else ""
            message = (
                f"{len({one for one, _ in common})} of the held-out prompts are training prompts too, so that they "
                f"would not measure what was learned: {pairs}{more}"
            )
            problems.append(loaded.problem("data.source", message))
    return useless


def _contents(
    loaded: LoadedPipeline, rows: Mapping[Namespace, Any], namespace: Namespace, problems: list[Problem]
) -> list[tuple[int, Any]]:
    """(row number, what it asks) of every row that is of the right form; the others are reported."""
    found: list[tuple[int, Any]] = []
    bad: list[str] = []
    made = rows.get(namespace, ())
    for number in range(len(made)):
        try:
            found.append((number, prompt_content(made[number])))
        except InputError as error:
            bad.append(f"{name_row(made, namespace, number)}: {error}")
        except Exception as error:  # rows of a user's own class may do anything
            bad.append(f"{name_row(made, namespace, number)} raised {type(error).__name__}: {error}")
    _report(loaded, namespace, bad, problems)
    return found


def _report(loaded: LoadedPipeline, namespace: Namespace, bad: list[str], problems: list[Problem]) -> None:
    """The first bad rows in full, the others as a number."""
    problems += [loaded.problem("data.source", message) for message in bad[:_SHOWN]]
    if len(bad) > _SHOWN:
        problems.append(loaded.problem("data.source", f"{len(bad) - _SHOWN} more {namespace} rows are of no use"))


def prompt_sets(
    loaded: LoadedPipeline,
    rows: Mapping[Namespace, Any],
    useless: Mapping[Namespace, set[int]],
    model: ResolvedModel | None,
    problems: list[Problem],
) -> PromptSets:
    """Are there enough rows? And, with a model, every prompt of the run rendered once (``useless`` rows are not)."""
    sets: dict[Namespace, PromptSet] = {}
    seen: dict[Namespace, set[tuple[int, ...]]] = {}
    for namespace, made in rows.items():
        repeat = namespace == "train" and bool(_known(loaded, "data.repeat", True))
        needed = _needed(loaded, namespace)
        if needed is not None and needed > len(made) and not repeat:
            problems.append(_too_few(loaded, namespace, needed, len(made)))
        if model is None:
            continue
        prompts = PromptSet(namespace, made, model.tokenizer, int(_known(loaded, "seed", 0)), repeat=repeat)
        drawn = len(made) if needed is None else min(needed, len(made))
        used: set[tuple[int, ...]] = set()
        bad: list[str] = []
        for index in range(drawn):
            if prompts.row_number(index) in useless[namespace]:
                continue
            try:
                used.add(prompts.prompt(index).token_ids)
            except VimeError as error:
                bad.append(str(error))
        _report(loaded, namespace, bad, problems)
        if bad:
            continue
        sets[namespace], seen[namespace] = prompts, used
    common = seen.get("train", set()) & seen.get("eval", set())
    if common and not any("are training prompts too" in problem.message for problem in problems):
        message = (
            f"{len(common)} of the held-out prompts have the tokens of training prompts: they would not measure what "
            "was learned"
        )
        problems.append(loaded.problem("data.source", message))
    longest = max((len(token_ids) for used in seen.values() for token_ids in used), default=0)
    return PromptSets(sets.get("train"), sets.get("eval"), longest)


def _needed(loaded: LoadedPipeline, namespace: Namespace) -> int | None:
    """Prompts that a run draws; None where the keys that say so are wrong."""
    p = loaded.pipeline
    try:
        if namespace == "eval":
            return p.stages.evaluate.prompts
        return p.steps * p.stages.rollout.prompts_per_step
    except MissingValue:
        return None


def _too_few(loaded: LoadedPipeline, namespace: Namespace, needed: int, have: int) -> Problem:
    if namespace == "eval":
        message = f"evaluation takes {needed} eval prompts, and the data source has {have}"
        return loaded.problem("stages.evaluate.prompts", message)
    message = (
        f"steps x prompts_per_step take {needed} train prompts, and the data source has {have}; data.repeat: true "
        "draws them again"
    )
    return loaded.problem("data.repeat", message)


def _known(loaded: LoadedPipeline, key: str, otherwise: Any) -> Any:
    """The value of a key, or something else where it is wrong."""
    try:
        return value_at(loaded.pipeline, key)
    except MissingValue:
        return otherwise
