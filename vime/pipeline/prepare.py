"""Everything a run needs from its pipeline, checked: model dimensions, tokenizer, prompts, user functions, sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlkernel.errors import RlkernelError
from rlkernel.models.config import ModelConfig
from rlkernel.models.tokenizer import Tokenizer
from vime.errors import VimeError
from vime.pipeline.combinations import check_combinations
from vime.pipeline.functions import FILTER, REWARD, SOURCE, FunctionProblem, Signature, UserFunction, load_function
from vime.pipeline.graph import Graph
from vime.pipeline.loading import LoadedPipeline
from vime.pipeline.machine import check_machine, check_run_directory
from vime.pipeline.model import ResolvedModel, resolve_model
from vime.pipeline.problems import PipelineError, Problem
from vime.pipeline.schema import Pipeline
from vime.pipeline.sizes import check_model_sizes, check_sequence_sizes, kv_blocks, longest_sequence
from vime.pipeline.stages import step_graph
from vime.tasks import FILTERS, REWARDS, SOURCES
from vime.tasks.prompts import PromptSet
from vime.types import NAMESPACES, Namespace, SamplingParams


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
        loaded: a pipeline of the right form.
        new_run: whether the run directory has to be free (a resumed run's is not).

    Raises:
        PipelineError: all problems that were found, in the order of the file.
    """
    problems = check_combinations(loaded)
    model, found = resolve_model(loaded)
    problems += found
    pipeline = loaded.pipeline
    source, rows, found = _rows(loaded)
    problems += found
    reward = _function(loaded, "stages.reward", pipeline.stages.reward, REWARD, REWARDS, problems)
    keep = None
    if pipeline.stages.filter.function is not None:
        keep = _function(loaded, "stages.filter", pipeline.stages.filter, FILTER, FILTERS, problems)
    elif pipeline.stages.filter.parameters:
        message = "parameters without stages.filter.function have nothing to go to"
        problems.append(loaded.problem("stages.filter.parameters", message))
    train = evaluation = None
    longest = 0
    if model is not None:
        problems += check_model_sizes(loaded, model)
        train, evaluation, longest = _prompt_sets(loaded, rows, model, problems)
        problems += check_sequence_sizes(loaded, model.config, longest)
    problems += check_machine(loaded, model.config if model is not None else None)
    if new_run:
        problems += check_run_directory(loaded)
    if problems or model is None or train is None or source is None or reward is None:
        raise PipelineError(_in_order(problems))
    stops = tuple(sorted({*model.stop_token_ids, *pipeline.stages.rollout.sampling.stop_token_ids}))
    return Prepared(
        pipeline,
        model.config,
        model.tokenizer,
        train,
        evaluation,
        source,
        reward,
        keep,
        stops,
        longest,
        kv_blocks(pipeline, model.config, longest),
        step_graph(pipeline),
    )


def _function(
    loaded: LoadedPipeline, key: str, section: Any, signature: Signature, tasks: Any, problems: list[Problem]
) -> UserFunction | None:
    """A user function of a section with ``function`` (or ``source``) and ``parameters``."""
    name_key = "source" if signature is SOURCE else "function"
    try:
        return load_function(getattr(section, name_key), section.parameters, signature, tasks)
    except FunctionProblem as problem:
        place = f"{key}.{name_key}" if problem.parameter is None else f"{key}.parameters.{problem.parameter}"
        problems.append(loaded.problem(place, str(problem), problem.nearest))
        return None


def _rows(loaded: LoadedPipeline) -> tuple[UserFunction | None, dict[Namespace, Any], list[Problem]]:
    """Call the data source for every namespace that is used."""
    problems: list[Problem] = []
    source = _function(loaded, "data", loaded.pipeline.data, SOURCE, SOURCES, problems)
    rows: dict[Namespace, Any] = {}
    if source is None:
        return None, rows, problems
    for namespace in NAMESPACES:
        if namespace == "eval" and not loaded.pipeline.stages.evaluate.prompts:
            continue
        try:
            made = source.call(namespace)
        except (VimeError, RlkernelError) as error:
            problems.append(loaded.problem("data", f"the data source {source.name!r} fails: {error}"))
            break
        except Exception as error:  # a user's function may raise anything
            message = f"the data source {source.name!r} raised {type(error).__name__} for {namespace!r}: {error}"
            problems.append(loaded.problem("data.source", message))
            break
        if not (hasattr(made, "__len__") and hasattr(made, "__getitem__")):
            message = f"the data source {source.name!r} returned a {type(made).__name__}; a sequence of rows is needed"
            problems.append(loaded.problem("data.source", message))
            break
        rows[namespace] = made
    return source, rows, problems


def _prompt_sets(
    loaded: LoadedPipeline, rows: dict[Namespace, Any], model: ResolvedModel, problems: list[Problem]
) -> tuple[PromptSet | None, PromptSet | None, int]:
    """Prompt sets, every prompt of the run rendered once, and the longest prompt."""
    p = loaded.pipeline
    train = evaluation = None
    longest = 0
    seen: dict[Namespace, set[tuple[int, ...]]] = {}
    for namespace, made in rows.items():
        if namespace == "train":
            key, needed = "data.train_prompts", p.steps * p.stages.rollout.prompts_per_step
            if p.data.train_prompts is not None and p.data.train_prompts > len(made):
                message = f"{p.data.train_prompts} are asked for; the data source has {len(made)} training rows"
                problems.append(loaded.problem(key, message))
            made = made[: p.data.train_prompts] if p.data.train_prompts is not None else made
            repeat = p.data.repeat
        else:
            key, needed, repeat = "stages.evaluate.prompts", p.stages.evaluate.prompts, False
        if not len(made):
            problems.append(
                loaded.problem("data.source", f"the data source has no {namespace} rows: at least one is needed")
            )
            continue
        if needed > len(made) and not repeat:
            hint = "; data.repeat: true draws them again" if namespace == "train" else ""
            what = "steps x prompts_per_step take" if namespace == "train" else "evaluation takes"
            place = "data.repeat" if namespace == "train" else key
            message = f"{what} {needed} {namespace} prompts, and the data source has {len(made)}{hint}"
            problems.append(loaded.problem(place, message))
            needed = len(made)
        prompts = PromptSet(namespace, made, model.tokenizer, p.seed, repeat=repeat)
        try:
            used = [prompts.prompt(i).token_ids for i in range(min(needed, len(made)))]
        except VimeError as error:
            problems.append(loaded.problem("data.source", str(error)))
            continue
        seen[namespace] = set(used)
        longest = max(longest, *(len(token_ids) for token_ids in used))
        if namespace == "train":
            train = prompts
        else:
            evaluation = prompts
    common = seen.get("train", set()) & seen.get("eval", set())
    if common:
        message = (
            f"{len(common)} of the held-out prompts are training prompts too: they would not measure what was learned"
        )
        problems.append(loaded.problem("data.source", message))
    return train, evaluation, longest


def _in_order(problems: list[Problem]) -> list[Problem]:
    return sorted(dict.fromkeys(problems), key=lambda problem: (problem.line, problem.column))
