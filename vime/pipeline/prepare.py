"""Everything a run needs from its pipeline, checked: model dimensions, tokenizer, prompts, user functions, sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlkernel.models.config import ModelConfig
from rlkernel.models.tokenizer import Tokenizer
from vime.pipeline.combinations import check_combinations
from vime.pipeline.functions import FILTER, REWARD, SOURCE, FunctionProblem, Signature, UserFunction, load_function
from vime.pipeline.graph import Graph
from vime.pipeline.loading import LoadedPipeline
from vime.pipeline.machine import (
    check_device,
    check_disk,
    check_kernels,
    check_memory,
    check_run_directory,
    check_threads,
)
from vime.pipeline.model import resolve_model
from vime.pipeline.problems import PipelineError, Problem
from vime.pipeline.prompts import call_source, check_rows, prompt_sets
from vime.pipeline.ranges import check_ranges
from vime.pipeline.schema import MissingValue, Pipeline
from vime.pipeline.sizes import check_contract, check_model_sizes, check_sequence_sizes, kv_blocks, longest_sequence
from vime.pipeline.stages import step_graph
from vime.tasks import FILTERS, REWARDS, SOURCES
from vime.tasks.prompts import PromptSet
from vime.types import Namespace, SamplingParams


@dataclass(frozen=True)
class Prepared:
    """A pipeline that was checked, with what the checks loaded.

    ``stop_token_ids`` are the ends of sequence of model and tokenizer and those of the pipeline; ``longest_prompt``
    is in tokens; ``num_blocks`` sizes the KV cache; ``graph`` declares the stages of a step.
    """

    pipeline: Pipeline
    config: ModelConfig
    tokenizer: Tokenizer
    train_prompts: PromptSet
    eval_prompts: PromptSet | None
    source: UserFunction
    reward: UserFunction
    filter: UserFunction | None
    stop_token_ids: tuple[int, ...]
    longest_prompt: int
    num_blocks: int
    graph: Graph

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that can be generated."""
        return longest_sequence(self.pipeline, self.config, self.longest_prompt)

    def sampling(self, namespace: Namespace) -> SamplingParams:
        """How samples of a namespace are drawn; evaluation differs from training in ``greedy`` alone."""
        settings = self.pipeline.stages.rollout.sampling
        return SamplingParams(
            temperature=settings.temperature,
            max_new_tokens=settings.max_new_tokens,
            top_k=settings.top_k,
            top_p=settings.top_p,
            greedy=namespace == "eval" and self.pipeline.stages.evaluate.greedy,
            stop_token_ids=self.stop_token_ids,
            stop_strings=settings.stop_strings,
        )


def prepare(loaded: LoadedPipeline, *, new_run: bool = True) -> Prepared:
    """Check everything and return what was loaded on the way.

    Args:
        loaded: a pipeline; of one with mistakes in its form, everything is checked that they leave.
        new_run: whether the run directory has to be free (a resumed run's is not).

    Raises:
        PipelineError: all problems that were found, in the order of the file.
    """
    problems = [*loaded.problems, *check_combinations(loaded), *check_ranges(loaded)]
    pipeline = loaded.pipeline

    def attempt(check: Callable[[], Sequence[Problem]]) -> None:
        """Leave a check out that asks for a key whose value is wrong: that is reported already."""
        with suppress(MissingValue):
            problems.extend(check())

    model = None
    with suppress(MissingValue):
        model, found = resolve_model(loaded)
        problems += found
    source = reward = keep = None
    with suppress(MissingValue):
        source = _function(loaded, "data", pipeline.data, SOURCE, SOURCES, problems)
    rows = call_source(loaded, source, problems) if source is not None else {}
    useless = check_rows(loaded, rows, problems)
    sets = prompt_sets(loaded, rows, useless, model, problems)
    with suppress(MissingValue):
        reward = _function(loaded, "stages.reward", pipeline.stages.reward, REWARD, REWARDS, problems)
    with suppress(MissingValue):
        if pipeline.stages.filter.function is not None:
            keep = _function(loaded, "stages.filter", pipeline.stages.filter, FILTER, FILTERS, problems)
    if model is not None:
        resolved = model
        attempt(lambda: check_model_sizes(loaded, resolved))
        attempt(lambda: check_sequence_sizes(loaded, resolved.config, sets.longest))
        attempt(lambda: check_memory(loaded, resolved.config, sets.longest))
        attempt(lambda: check_kernels(loaded, resolved.config))
        attempt(lambda: check_disk(loaded, resolved.config))
    attempt(lambda: check_threads(loaded))
    attempt(lambda: check_device(loaded))
    attempt(lambda: check_run_directory(loaded, new_run=new_run))
    if not problems and model is not None:
        problems += check_contract(loaded, model.config)
    if problems or model is None or sets.train is None or source is None or reward is None:
        raise PipelineError(_in_order(problems))
    stops = tuple(sorted({*model.stop_token_ids, *pipeline.stages.rollout.sampling.stop_token_ids}))
    return Prepared(
        pipeline,
        model.config,
        model.tokenizer,
        sets.train,
        sets.evaluation,
        source,
        reward,
        keep,
        stops,
        sets.longest,
        kv_blocks(pipeline, model.config, sets.longest),
        step_graph(pipeline),
    )


def _function(
    loaded: LoadedPipeline, key: str, section: Any, signature: Signature, tasks: Any, problems: list[Problem]
) -> UserFunction | None:
    """A user function of a section with ``function`` (or ``source``) and ``parameters``."""
    name_key = "source" if signature is SOURCE else "function"
    name = getattr(section, name_key)
    try:
        return load_function(name, section.parameters, signature, tasks)
    except* FunctionProblem as group:
        for problem in group.exceptions:
            assert isinstance(problem, FunctionProblem)
            place = f"{key}.{name_key}" if problem.parameter is None else f"{key}.parameters.{problem.parameter}"
            problems.append(loaded.problem(place, str(problem), problem.nearest))
    return None


def _in_order(problems: list[Problem]) -> list[Problem]:
    return sorted(dict.fromkeys(problems), key=lambda problem: (problem.line, problem.column))
