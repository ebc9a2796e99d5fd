"""The pipeline file: every key, its type and its default.

Keys marked ``bits: false`` may not change a bit of a run (tokens, log-probabilities, gradients, weights);
:func:`bit_relevant` leaves exactly these out, so that two runs can be compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_NO_BITS: dict[str, Any] = {"bits": False}
_MOST = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=_MOST)]
CountOrZero = Annotated[int, Field(ge=0, le=_MOST)]
Bytes = Annotated[int, Field(ge=1, lt=2**63)]


class MissingValue(Exception):
    """A check asked for a key whose value is wrong, in a pipeline that is checked as far as it can be."""


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys, no conversions between types, finite numbers only.

    A section of a file with mistakes lacks the keys that are wrong: reading one raises :class:`MissingValue`, so that
    no check can take a default for what somebody wrote.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:
                raise MissingValue(name)
            return super().__getattr__(name)


class Model(Section):
    """The policy: a built-in random preset, or a folder or GGUF file with weights (exactly one of the two).

    ``overrides`` replace dimensions of a preset (``num_layers: 4``). ``tokenizer`` is a folder; by default the
    preset's or the model folder's own.
    """

    preset: str | None = None
    path: str | None = Field(default=None, json_schema_extra=_NO_BITS)
    overrides: dict[str, Any] = Field(default_factory=dict)
    tokenizer: str | None = None


class Topology(Section):
    """Largest degree of each parallel axis over which the run's bits are claimed not to change."""

    tp: Count = 1
    sp: Count = 1
    cp: Count = 1
    ep: Count = 1
    dp: Count = 1
    pp: Count = 1


class Contract(Section):
    """What both sides compute: profile, dtype of weights and activations, claimed topology."""

    profile: Literal["portable", "hopper", "cdna3"] = "portable"
    dtype: Literal["float32", "bfloat16"] = "float32"
    topology: Topology = Topology()


class Numerics(Section):
    """Per side: ``exact`` keeps the contract; ``native`` uses torch's own kernels, for comparison."""

    rollout: Literal["exact", "native"] = "exact"
    trainer: Literal["exact", "native"] = "exact"


class Data(Section):
    """Where prompts come from. ``source`` is a task's name or a user function (docs/pipeline.md).

    ``train_prompts`` takes the first so many training rows (null: all). ``repeat`` allows a new permutation of
    the same rows when they are used up; without it, too few rows are an error.
    """

    source: str
    parameters: dict[str, Any] = Field(default_factory=dict)
    train_prompts: Count | None = None
    repeat: bool = False


class Sampling(Section):
    """How training samples are drawn. ``top_k`` 0 and ``top_p`` 1 leave the distribution whole.

    Generation stops at the model's end tokens, at ``stop_token_ids``, at a ``stop_strings`` entry, or after
    ``max_new_tokens``.
    """

    temperature: float = Field(default=1.0, gt=0.0)
    top_k: CountOrZero = 0
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    max_new_tokens: Count = 16
    stop_token_ids: tuple[CountOrZero, ...] = Field(default=(), strict=False)
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = Field(default=(), strict=False)


class Rollout(Section):
    """Generation. The KV cache has ``num_blocks`` blocks, or what fits ``kv_memory_bytes``; with neither it holds
    ``max_num_seqs`` of the longest possible sequences."""

    engine: Literal["native"] = "native"
    prompts_per_step: Count
    samples_per_prompt: Count = 8
    sampling: Sampling = Sampling()
    max_num_seqs: Count = Field(default=256, json_schema_extra=_NO_BITS)
    max_batched_tokens: Count = Field(default=2048, json_schema_extra=_NO_BITS)
    block_size: Count = Field(default=16, json_schema_extra=_NO_BITS)
    num_blocks: Count | None = Field(default=None, json_schema_extra=_NO_BITS)
    kv_memory_bytes: Bytes | None = Field(default=None, json_schema_extra=_NO_BITS)
    prefix_caching: bool = Field(default=True, json_schema_extra=_NO_BITS)


class Reward(Section):
    """A task's name or a user function ``(prompt, sample, text) -> float``.

    ``on_error`` says what an exception, a timeout or a reward that is not finite does: ``stop`` ends the run so
    that it can be resumed, ``drop`` drops the sample with the reason logged.
    """

    function: str
    parameters: dict[str, Any] = Field(default_factory=dict)
    timeout_s: float | None = Field(default=None, gt=0.0)
    on_error: Literal["stop", "drop"] = "stop"


class Filter(Section):
    """Which samples train. ``function`` is ``(samples, rewards) -> Sequence[bool]``, called once a group.

    ``zero_variance``: what happens to a group whose rewards are all equal. ``incomplete_group``: what happens to
    the rest of a group that lost samples.
    """

    function: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    zero_variance: Literal["keep", "drop"] = "keep"
    incomplete_group: Literal["keep", "drop"] = "drop"


class Advantage(Section):
    """``grpo``: reward minus the mean of its group. ``reinforce_baseline``: reward minus ``baseline``.

    ``normalise: std`` divides by the standard deviation of the same set, plus ``epsilon``.
    """

    estimator: Literal["grpo", "reinforce_baseline"] = "grpo"
    baseline: Literal["leave_one_out", "group_mean", "step_mean"] = "leave_one_out"
    normalise: Literal["std", "none"] = "std"
    epsilon: float = Field(default=1e-6, gt=0.0)


class Kl(Section):
    """KL penalty against a frozen reference. ``initial`` is the model as it was before the first step."""

    coefficient: float = Field(default=0.0, ge=0.0)
    estimator: Literal["k1", "k2", "k3"] = "k3"
    reference: Literal["initial"] | None = None


class Loss(Section):
    """``ppo_clip`` clips the importance ratio to [1 - clip_low, 1 + clip_high]; ``reinforce`` uses none.

    ``normalise``: every trained token of the step weighs the same, or every sample does.
    """

    kind: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    clip_high: float = Field(default=0.2, gt=0.0)
    normalise: Literal["token_mean", "sequence_mean"] = "token_mean"
    kl: Kl = Kl()


class Optimizer(Section):
    """AdamW. The schedule runs over all updates of the run: ``warmup_updates`` rising linearly, then constant, or
    falling to ``final_fraction`` of ``learning_rate`` linearly or along half a cosine. A run that has no more updates
    than ``warmup_updates`` ends on the way up, which only ``constant`` allows."""

    learning_rate: float = Field(gt=0.0)
    betas: tuple[
        Annotated[float, Field(ge=0.0, lt=1.0)],
        Annotated[float, Field(ge=0.0, lt=1.0)],
    ] = Field(default=(0.9, 0.95), strict=False)
    eps: float = Field(default=1e-8, gt=0.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_updates: CountOrZero = 0
    final_fraction: float = Field(default=0.0, ge=0.0, le=1.0)
    max_grad_norm: float = Field(default=1.0, gt=0.0)


class Train(Section):
    """Optimizer updates. A step's groups are cut, in order, into ``updates_per_step`` equal parts of one update each.

    ``micro_batch_samples`` whole sequences go through the model at a time (gradient accumulation).
    ``moments``: where AdamW's moments are kept with ``device: cuda``; ``host`` passes them through the GPU in parts at
    every update, which takes seconds for a large model and 8 bytes a parameter less there.
    ``require_full_distribution`` refuses sampling that removes candidates (top-k, top-p).
    """

    trainer: Literal["native"] = "native"
    loss: Loss = Loss()
    optimizer: Optimizer
    updates_per_step: Count = 1
    micro_batch_samples: Count = Field(default=64, json_schema_extra=_NO_BITS)
    activation_checkpointing: bool = Field(default=False, json_schema_extra=_NO_BITS)
    moments: Literal["device", "host"] = Field(default="device", json_schema_extra=_NO_BITS)
    require_full_distribution: bool = True


class Sync(Section):
    """How weights travel from trainer to engine: handed over in this process (``memory``), through POSIX shared memory
    (``shm``), as a file in the run directory (``disk``), or as files with the tensors that changed (``disk_delta``)."""

    transport: Literal["memory", "shm", "disk", "disk_delta"] = Field(default="memory", json_schema_extra=_NO_BITS)


class Evaluate(Section):
    """Held-out prompts before the first step, after the last, and every ``every`` steps (0: not in between).

    ``prompts`` 0 switches evaluation off.
    """

    every: CountOrZero = 0
    prompts: CountOrZero = 0
    samples_per_prompt: Count = 1
    greedy: bool = True


class Stages(Section):
    """The stages of a step."""

    rollout: Rollout
    reward: Reward
    filter: Filter = Filter()
    advantage: Advantage = Advantage()
    train: Train
    sync: Sync = Sync()
    evaluate: Evaluate = Evaluate()


class Checkpoint(Section):
    """A checkpoint every ``every`` steps and after the last; the newest ``keep`` are kept.

    0 writes none at all: nothing then takes the time and the disk (16 bytes a parameter), and a run that was stopped
    starts again from its beginning.
    """

    every: CountOrZero = 10
    keep: Count = 2


class Pipeline(Section):
    """A whole run."""

    name: str = Field(min_length=1, json_schema_extra=_NO_BITS)
    seed: int = Field(default=0, ge=0, lt=2**64)
    run_directory: str = Field(min_length=1, json_schema_extra=_NO_BITS)
    model: Model
    contract: Contract = Contract()
    device: Literal["cpu", "cuda"] = Field(default="cpu", json_schema_extra=_NO_BITS)
    placement: Literal["colocated", "split"] = Field(default="colocated", json_schema_extra=_NO_BITS)
    numerics: Numerics = Numerics()
    data: Data
    stages: Stages
    steps: Count
    max_staleness: CountOrZero = 0
    threads: Count | None = Field(default=None, json_schema_extra=_NO_BITS)
    checkpoint: Checkpoint = Field(default=Checkpoint(), json_schema_extra=_NO_BITS)
    on_mismatch: Literal["stop", "continue"] = "stop"
    on_nonfinite: Literal["stop", "continue"] = "stop"


def value_at(pipeline: Pipeline, key: str) -> object:
    """The value of a dotted key. Raises MissingValue where it is wrong."""
    value: object = pipeline
    for part in key.split("."):
        value = getattr(value, part)
    return value


def bit_relevant(pipeline: Pipeline) -> dict[str, Any]:
    """The pipeline without the keys that may not change a bit, as plain data (lists, dicts, scalars)."""
    return _relevant(pipeline)


def _relevant(section: BaseModel) -> dict[str, Any]:
    plain = section.model_dump(mode="json")
    result: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("bits") is False:
            continue
        value = getattr(section, name)
        result[name] = _relevant(value) if isinstance(value, BaseModel) else plain[name]
    return result
