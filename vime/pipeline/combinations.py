"""Keys that are each possible but impossible together. Pure: looks at nothing but the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vime.pipeline.loading import LoadedPipeline
from vime.pipeline.problems import Problem
from vime.pipeline.schema import MissingValue, Pipeline

Found = Iterator[tuple[str, str]]
Rule = Callable[[Pipeline], Found]


def check_rules(loaded: LoadedPipeline, rules: tuple[Rule, ...]) -> list[Problem]:
    """What rules find; one that asks for a key that is wrong is left out, since that key is reported already."""
    found: list[Problem] = []
    for rule in rules:
        try:
            for key, message in rule(loaded.pipeline):
                found.append(loaded.problem(key, message))
        except MissingValue:
            continue
    return found


def check_combinations(loaded: LoadedPipeline) -> list[Problem]:
    """Everything that contradicts something else; each message names both keys."""
    return check_rules(loaded, RULES)


def _model_source(p: Pipeline) -> Found:
    if (p.model.preset is None) == (p.model.path is None):
        both = "both are set" if p.model.preset is not None else "neither is set"
        yield "model", f"a model comes from model.preset or from model.path, exactly one of them; {both}"


def _overrides(p: Pipeline) -> Found:
    if p.model.path is not None and p.model.overrides:
        names = ", ".join(p.model.overrides)
        yield (
            "model.overrides",
            f"model.path = {p.model.path!r} has dimensions of its own; {names} can only be preset's",
        )


def _powers_of_two(axis: str) -> Rule:
    def rule(p: Pipeline) -> Found:
        degree = getattr(p.contract.topology, axis)
        if degree & (degree - 1):
            yield f"contract.topology.{axis}", f"{degree} is not a power of two: claimed degrees form a balanced tree"

    return rule


def _only_one(axis: str) -> Rule:
    def rule(p: Pipeline) -> Found:
        degree = getattr(p.contract.topology, axis)
        if degree != 1:
            yield f"contract.topology.{axis}", f"{degree} cannot be claimed yet: only 1 is implemented for this axis"

    return rule


def _data_parallel(p: Pipeline) -> Found:
    dp = p.contract.topology.dp
    samples = p.stages.rollout.prompts_per_step * p.stages.rollout.samples_per_prompt
    if samples % dp:
        yield (
            "contract.topology.dp",
            f"{dp} does not divide the step's {samples} samples (stages.rollout.prompts_per_step x "
            "samples_per_prompt): gradients reduce over that many equal blocks",
        )


def _transport(p: Pipeline) -> Found:
    if p.placement == "split" and p.stages.sync.transport == "memory":
        yield (
            "stages.sync.transport",
            "'memory' cannot reach an engine in another process (placement: split); 'shm', 'disk' and 'disk_delta' can",
        )


def _native(p: Pipeline) -> Found:
    native = [side for side in ("rollout", "trainer") if getattr(p.numerics, side) == "native"]
    if native and p.on_mismatch == "stop":
        yield (
            f"numerics.{native[0]}",
            "'native' kernels do not keep the contract, and on_mismatch: stop would end the run at its first step; "
            "on_mismatch: continue measures the mismatch",
        )


def _profile(p: Pipeline) -> Found:
    profile, dtype = p.contract.profile, p.contract.dtype
    if profile == "portable":
        return
    if p.device == "cpu":
        yield (
            "contract.profile",
            f"{profile!r} is computed by the matrix unit of a GPU, and device is 'cpu', which computes 'portable'; "
            "device: cuda computes both, on a GPU that has the profile",
        )
    if dtype != "bfloat16":
        yield "contract.dtype", f"{dtype!r} is not what profile {profile!r} has: its matrix unit takes bfloat16"


def _native_on_gpu(p: Pipeline) -> Found:
    sampling = p.stages.rollout.sampling
    if p.device != "cuda" or p.numerics.rollout != "native":
        return
    for key, off in (("top_k", 0), ("top_p", 1.0)):
        if getattr(sampling, key) != off:
            yield (
                f"stages.rollout.sampling.{key}",
                f"numerics.rollout: native draws from whole distributions on a GPU; set {key}: {off}",
            )


def _moments(p: Pipeline) -> Found:
    if p.stages.train.moments == "host" and p.device == "cpu":
        yield (
            "stages.train.moments",
            "'host' keeps the optimizer's moments out of a GPU's memory, and device is 'cpu': all of it is on the host",
        )


def _staleness(p: Pipeline) -> Found:
    if p.max_staleness:
        yield "max_staleness", f"{p.max_staleness} is not implemented: steps train on samples of their own version (0)"


def _whole_distribution(key: str, off: float) -> Rule:
    def rule(p: Pipeline) -> Found:
        value = getattr(p.stages.rollout.sampling, key)
        if value != off and p.stages.train.require_full_distribution:
            yield (
                f"stages.rollout.sampling.{key}",
                f"{value} removes candidates, so importance ratios would not be those of the sampler, and "
                f"stages.train.require_full_distribution is true; set {key}: {off} or that key to false",
            )

    return rule


def _cache_size(p: Pipeline) -> Found:
    if p.stages.rollout.num_blocks is not None and p.stages.rollout.kv_memory_bytes is not None:
        yield "stages.rollout.num_blocks", "num_blocks and kv_memory_bytes both size the KV cache: set one of them"


def _block_size(p: Pipeline) -> Found:
    if p.stages.rollout.block_size % 8:
        yield "stages.rollout.block_size", f"{p.stages.rollout.block_size} is not a multiple of 8"


def _stop_strings(p: Pipeline) -> Found:
    texts = p.stages.rollout.sampling.stop_strings
    duplicates = [text for text in dict.fromkeys(texts) if texts.count(text) > 1]
    if duplicates:
        yield "stages.rollout.sampling.stop_strings", f"{duplicates} stand there more than once"


def _group_size(p: Pipeline) -> Found:
    advantage = p.stages.advantage
    over_group = advantage.estimator == "grpo" or advantage.baseline != "step_mean"
    if over_group and p.stages.rollout.samples_per_prompt < 2:
        yield (
            "stages.rollout.samples_per_prompt",
            f"stages.advantage.estimator = {advantage.estimator!r} compares the samples of one prompt: at least 2",
        )


def _updates(p: Pipeline) -> Found:
    updates, prompts = p.stages.train.updates_per_step, p.stages.rollout.prompts_per_step
    if prompts % updates:
        yield (
            "stages.train.updates_per_step",
            f"{updates} does not divide stages.rollout.prompts_per_step = {prompts}: "
            "an update takes whole groups, the same number each",
        )


def _kl(p: Pipeline) -> Found:
    kl = p.stages.train.loss.kl
    if kl.coefficient > 0 and kl.reference is None:
        yield (
            "stages.train.loss.kl.coefficient",
            f"{kl.coefficient} needs a reference: set stages.train.loss.kl.reference: initial",
        )
    if kl.coefficient == 0 and kl.reference is not None:
        yield (
            "stages.train.loss.kl.reference",
            f"{kl.reference!r} is of no use while stages.train.loss.kl.coefficient is 0",
        )


def _warmup(p: Pipeline) -> Found:
    optimizer = p.stages.train.optimizer
    updates, warmup = p.steps * p.stages.train.updates_per_step, optimizer.warmup_updates
    if warmup >= updates and optimizer.schedule != "constant":
        yield (
            "stages.train.optimizer.warmup_updates",
            f"{warmup} is not below the run's updates, {updates} (steps x updates_per_step): "
            f"nothing of the schedule {optimizer.schedule!r} would be left",
        )


def _decay(p: Pipeline) -> Found:
    optimizer = p.stages.train.optimizer
    if optimizer.learning_rate * optimizer.weight_decay >= 1:
        yield (
            "stages.train.optimizer.weight_decay",
            f"{optimizer.weight_decay} with learning_rate = {optimizer.learning_rate} takes whole weights away: an "
            "update multiplies each by 1 - learning_rate x weight_decay, which has to stay above 0",
        )


def _nothing_to_evaluate(p: Pipeline) -> Found:
    if p.stages.evaluate.every and not p.stages.evaluate.prompts:
        yield (
            "stages.evaluate.every",
            f"{p.stages.evaluate.every}, but stages.evaluate.prompts is 0: there is nothing to evaluate",
        )


def _greedy(p: Pipeline) -> Found:
    evaluate = p.stages.evaluate
    if evaluate.greedy and evaluate.samples_per_prompt > 1:
        yield (
            "stages.evaluate.samples_per_prompt",
            f"{evaluate.samples_per_prompt} samples would be equal while stages.evaluate.greedy is true",
        )


def _filter_parameters(p: Pipeline) -> Found:
    if p.stages.filter.function is None and p.stages.filter.parameters:
        yield "stages.filter.parameters", "parameters without stages.filter.function have nothing to go to"


RULES: tuple[Rule, ...] = (
    _model_source,
    _overrides,
    _powers_of_two("tp"),
    _powers_of_two("dp"),
    *(_only_one(axis) for axis in ("sp", "cp", "ep", "pp")),
    _data_parallel,
    _transport,
    _native,
    _profile,
    _native_on_gpu,
    _moments,
    _staleness,
    _whole_distribution("top_p", 1.0),
    _whole_distribution("top_k", 0),
    _cache_size,
    _block_size,
    _stop_strings,
    _group_size,
    _updates,
    _kl,
    _warmup,
    _decay,
    _nothing_to_evaluate,
    _greedy,
    _filter_parameters,
)
