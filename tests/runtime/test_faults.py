"""Planted faults, each through the whole loop and the command line: caught, named, and nothing trained on it."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.runtime import faults
from tests.runtime.helpers import Commands, Ended, reward
from vime.errors import InputError, Interrupted, InvariantViolation
from vime.timeline.events import SampleDropped, StepCompared, StepTrained, SyncRolledBack

PUBLIC = "tests.runtime.test_faults"


@pytest.fixture
def vime(tmp_path, monkeypatch, capsys) -> Commands:
    return Commands(tmp_path, monkeypatch, capsys)


@pytest.fixture
def intact_subnormals():
    yield
    torch.set_flush_denormal(False)


def caught(ended: Ended, *texts: str, trained: int, kind: type[Exception] = InvariantViolation, code: int = 1) -> None:
    """Exit code, error type and sentence are right, and exactly ``trained`` steps were trained before it."""
    assert isinstance(ended.error, kind), (ended.error, ended.message)
    assert ended.code == code
    for text in texts:
        assert text in ended.message, ended.message
    assert ended.count("step_trained") == trained
    assert ended.count("run_finished") == 0
    # the log says why, so that whoever comes later can read it
    reasons = [event.reason for event in ended.events if event.type == "run_interrupted"]
    assert len(reasons) == 1 and all(text in reasons[0] for text in texts)


def clean(ended: Ended, steps: int = 2) -> None:
    """The run ended well, every step compared all its tokens, and not one bit differed."""
    assert (ended.code, ended.error) == (0, None), ended.message
    assert len(ended.reports) == steps == ended.count("step_trained")
    for report in ended.reports:
        assert report["compared_tokens"] == report["num_tokens"] > 0
        assert (report["mismatch_count"], report["distribution_mismatch_count"], report["nonfinite_count"]) == (0, 0, 0)
        assert (report["ratio_min"], report["ratio_max"], report["diagnosis"]) == (1.0, 1.0, None)


# ------------------------------------------------------------------------------------------ no fault


def test_without_a_fault_the_run_is_clean(vime):
    """The negative twin of everything below."""
    clean(vime.run("stages.evaluate.prompts=2"))
    clean(vime.run("threads=2"))


# ------------------------------------------------------------------------------------------ versions, caches


def test_an_engine_that_stays_behind_is_caught_at_the_commit(vime):
    ended = vime.run(plant=faults.does_not_commit)
    caught(ended, "step 0, sync: engine native-0 serves version 0", "after the commit of version 1", trained=1)


def test_old_weights_under_the_new_label_are_caught_before_anything_is_scored(vime):
    ended = vime.run(plant=faults.serves_old_weights_under_the_new_label)
    caught(ended, "step 1, rollout: engine native-0 serves version 1 with digest", "no longer", trained=1)
    assert ended.count("step_compared") == 1


def test_a_model_bound_to_old_weights_is_caught_by_the_comparison(vime):
    ended = vime.run(plant=faults.computes_with_old_weights)
    caught(
        ended,
        "step 1, compare: ",
        "distributions differ between rollout and trainer; the worst is sample train/",
        "the first differing boundary is embedding",
        trained=1,
    )


def test_a_stale_prefix_block_with_forged_labels_is_caught(vime):
    ended = vime.run(plant=faults.keeps_prefix_cache(forge_keys=True, forge_blocks=True))
    caught(ended, "step 1, compare: ", "it is the rollout's array that it does not reproduce", trained=1)


def test_a_stale_prefix_block_is_not_read(vime):
    ended = vime.run(plant=faults.keeps_prefix_cache(forge_keys=True, forge_blocks=False))
    caught(ended, "step 1, rollout: ", "would read KV block", "written by weight versions 0 to 0", trained=1)


def test_blocks_of_an_old_version_are_not_found(vime):
    clean(vime.run(plant=faults.keeps_prefix_cache(forge_keys=False, forge_blocks=False)))


# ------------------------------------------------------------------------------------------ flipped bits


@pytest.mark.parametrize(
    ("plant", "texts", "trained"),
    [
        (faults.flip_staged_weight, ["version 0 is to be committed with digest", "the staged bytes have"], 0),
        (faults.flip_weight_in_transit, ["engine native-0 staged version 0 with digest", "the trainer published"], 0),
        (faults.flip_served_weight, ["step 0, rollout: engine native-0 serves version 0 with digest"], 0),
        (faults.flip_kv, ["step 0, compare: ", "it is the rollout's array that it does not reproduce"], 0),
        (faults.flip_trainer_rows, ["step 0, score: the trainer's packed weights have digest"], 0),
        (faults.flip_trainer_columns, ["step 0, train: the packed columns of layers.0.o_proj"], 0),
        (faults.flip_trainer_master, ["step 0, train: element 3 of model.norm.weight is not its float32 master"], 0),
    ],
)
def test_one_flipped_bit_is_caught(vime, plant, texts, trained):
    caught(vime.run(plant=plant), *texts, trained=trained)


def test_a_failed_publication_is_rolled_back(vime):
    ended = vime.run(plant=faults.flip_weight_in_transit)
    rolled_back = [event for event in ended.events if isinstance(event, SyncRolledBack)]
    assert len(rolled_back) == 1 and "staged version 0" in rolled_back[0].reason
    assert ended.count("sync_committed") == 0


# ------------------------------------------------------------------------------------------ copied arrays


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"copy": False, "inflate": True, "unknown": "forward"}, "share memory with the rollout's"),
        ({"copy": True, "inflate": False, "unknown": "forward"}, "its evidence shows"),
        ({"copy": True, "inflate": True, "unknown": "forward"}, "are not a forward over these tokens"),
        ({"copy": True, "inflate": True, "unknown": "omit"}, "the trainer returned 0 scores of train/"),
        ({"copy": True, "inflate": True, "unknown": "other"}, "differ between rollout and trainer"),
    ],
)
def test_the_rollouts_array_in_place_of_the_trainers_is_caught(vime, options, text):
    ended = vime.run(plant=faults.returns_rollout_arrays(**options))
    caught(ended, "step 0, ", text, trained=0)
    # a copy is equal to what it was copied from: the log must never say that it was compared and equal
    compared = [event for event in ended.events if isinstance(event, StepCompared)]
    assert all(event.mismatch_count for event in compared) and len(compared) == (options["unknown"] == "other")


def test_a_copying_trainer_is_caught_where_mismatches_are_tolerated(vime):
    plant = faults.returns_rollout_arrays(copy=True, inflate=True, unknown="forward")
    caught(vime.run("on_mismatch=continue", plant=plant), "are not a forward over these tokens", trained=0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda first: None, "the trainer shows no training forward"),
        (lambda first: replace(first, manifest_digest="0" * 64), "the training forward used weights 0000"),
        (lambda first: replace(first, samples=_nudged(first.samples)), "differs from its scoring forward at response"),
    ],
)
def test_another_training_forward_than_the_scored_one_is_caught(vime, change, text):
    caught(vime.run(plant=faults.changes_first_forward(change)), "step 0, train: ", text, trained=0)


def _nudged(samples):
    first = samples[0]
    value = np.nextafter(first.logprobs[0], np.float32(0))
    return (replace(first, logprobs=faults.altered(first.logprobs, 0, value)), *samples[1:])


# ------------------------------------------------------------------------------------------ not finite


def nan_in(sample):
    """NaN at the second token of train/0/1, or the first where it has one token."""
    if str(sample.sample_id) != "train/0/1":
        return sample
    return replace(sample, logprobs=faults.altered(sample.logprobs, min(1, len(sample.logprobs) - 1), np.nan))


NAN_SIDES = {
    "rollout": faults.changes_samples(lambda samples: [nan_in(sample) for sample in samples]),
    "trainer": faults.changes_scores(nan_in),
}


def both(sides):
    for plant in NAN_SIDES.values():
        plant(sides)


@pytest.mark.parametrize("side", ["rollout", "trainer", "both"])
def test_a_nan_stops_the_run_and_names_the_token(vime, side):
    ended = vime.run(plant=NAN_SIDES.get(side, both))
    caught(ended, "step 0, compare: 1 log-probabilities of 1 samples are not finite", "sample train/0/1", trained=0)
    value = {"rollout": "rollout nan, trainer -", "trainer": "trainer nan)", "both": "rollout nan, trainer nan"}
    assert value[side] in ended.message


def test_a_nan_on_one_side_is_a_mismatch_even_where_nan_is_tolerated(vime):
    ended = vime.run("on_nonfinite=continue", plant=NAN_SIDES["rollout"])
    caught(ended, "step 0, compare: 1 of", "the worst is sample train/0/1", trained=0)


@pytest.mark.parametrize("side", ["rollout", "trainer", "both"])
def test_a_tolerated_nan_is_counted_and_its_sample_is_not_trained(vime, side):
    ended = vime.run("on_nonfinite=continue", "on_mismatch=continue", "steps=1", plant=NAN_SIDES.get(side, both))
    assert ended.code == (0 if side == "both" else 1)  # equal NaN on both sides is no mismatch
    (report,) = ended.reports
    assert report["nonfinite_count"] == 1 and report["dropped_samples"] == {"nonfinite": 1}
    assert report["mismatch_count"] == (0 if side == "both" else 1) and report["distribution_mismatch_count"] == 0
    assert report["loss"] is not None and report["max_abs_diff"] == 0.0
    (trained,) = (event for event in ended.events if isinstance(event, StepTrained))
    lost = next(e.num_tokens for e in ended.events if e.type == "sample_finished" and str(e.sample_id) == "train/0/1")
    assert trained.metrics["trained_tokens"] == report["num_tokens"] - lost


def test_a_nan_of_the_training_forward_is_named_and_nothing_is_updated(vime):
    def plant(sides):
        model = sides.trainer._model
        whole = model.forward

        def forward(*args, **kwargs):
            tape = whole(*args, **kwargs)
            tape.statistics.logprob[0] = np.nan
            return tape

        model.forward = forward

    ended = vime.run(plant=plant)
    caught(ended, "step 0, train: the log-probability of sample train/0/0, response token 0", "nan", trained=0)


def test_a_step_of_nothing_but_nan_is_not_trained(vime):
    plant = faults.changes_scores(lambda s: replace(s, logprobs=np.full_like(s.logprobs, np.nan)))
    ended = vime.run("on_nonfinite=continue", "on_mismatch=continue", plant=plant)
    # the altered sample and the original share a prefix of equal (canonical) NaN: the comparison is what stops it
    caught(ended, "step 0, train: every sample has a log-probability that is not finite", trained=0)


# ------------------------------------------------------------------------------------------ samples and scores


def drop_last(samples):
    return samples[:-1]


def double(samples):
    return [*samples, samples[0]]


def foreign(samples):
    return [replace(samples[0], sample_id=replace(samples[0].sample_id, k=77)), *samples[1:]]


def other_prompt(samples):
    return [replace(samples[0], prompt_token_ids=samples[0].prompt_token_ids[1:]), *samples[1:]]


def short_array(samples):
    return [faults.with_array(samples[0], "logprobs", samples[0].logprobs[:-1]), *samples[1:]]


def wide_array(samples):
    return [faults.with_array(samples[0], "logprobs", samples[0].logprobs.astype(np.float64)), *samples[1:]]


def unknown_token(samples):
    return [replace(samples[0], token_ids=(10_000, *samples[0].token_ids[1:])), *samples[1:]]


def other_token(samples):
    first = samples[0]
    return [replace(first, token_ids=(first.token_ids[0] ^ 1, *first.token_ids[1:])), *samples[1:]]


def old_version(samples):
    runs = tuple(replace(run, version=run.version - 1) for run in samples[0].versions)
    return [replace(samples[0], versions=runs), *samples[1:]]


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        (drop_last, ["step 0, rollout: engine native-0 did not return 1 of 8 samples: train/1/3"]),
        (double, ["step 0, rollout: engine native-0 returned sample train/0/0, which is not due"]),
        (foreign, ["returned sample train/0/77, which is not due"]),
        (other_prompt, ["sample train/0/0 came back with another prompt"]),
        (short_array, ["sample train/0/0 has", "but its logprobs are float32 of shape"]),
        (wide_array, ["sample train/0/0 has", "but its logprobs are float64"]),
        (unknown_token, ["sample train/0/0 holds the token id 10000"]),
        (old_version, ["train/0/0", "tokens carry version -1", "(invariant 3)"]),
        (other_token, ["step 0, compare: ", "the worst is sample train/0/0"]),
    ],
)
def test_a_wrong_sample_is_caught(vime, change, texts):
    caught(vime.run(plant=faults.changes_samples(change)), *texts, trained=0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: None if s.sample_id.k == 2 else s, "the trainer returned"),
        (lambda s: replace(s, logprobs=s.logprobs[:-1]), "but the trainer's logprobs are float32 of shape"),
        (lambda s: replace(s, logprobs=s.logprobs.astype(np.float16)), "but the trainer's logprobs are float16"),
        (lambda s: replace(s, digests=s.digests[:, :1]), "but the trainer's digests are uint64 of shape"),
    ],
)
def test_wrong_scores_are_caught(vime, change, text):
    caught(vime.run(plant=faults.changes_scores(change)), "step 0, ", text, "train/", trained=0)


# ------------------------------------------------------------------------------------------ kernels

KERNELS = {
    "qkv_proj": faults.ReversedColumns(heads=True),
    "gate_up_proj": faults.ReversedColumns(heads=False),
    "o_proj": faults.ReversedRows(heads=True),
    "down_proj": faults.ReversedRows(heads=False),
    "attention": faults.ReversedAttention(),
    "rms_norm": faults.RotatedNorm(),
    "logprob": faults.ReversedHead(),
}
NAMES = {"rms_norm": "layers.0.attention_norm", "logprob": "logprob (logits)"}


@pytest.mark.parametrize("kind", KERNELS)
def test_a_swapped_reduction_order_is_caught_and_its_region_named(vime, kind):
    for side in (faults.engine_runs, faults.trainer_runs):
        ended = vime.run(plant=side(kind, KERNELS[kind]))
        name = NAMES.get(kind, f"layers.0.{kind}")
        caught(ended, "step 0, compare: ", f"the first differing boundary is {name}", trained=0)
        (compared,) = (event for event in ended.events if isinstance(event, StepCompared))
        assert compared.distribution_mismatch_count > 0
        assert compared.metrics["diagnosis"]["boundary"]["differing"] > 0


def test_a_kernel_that_differs_in_one_case_only_is_caught(vime):
    decode = faults.ReversedColumns(True, ("rollout_decode",))
    ended = vime.run(plant=faults.engine_runs("qkv_proj", decode))
    caught(ended, "step 0, compare: ", "the rollout's array that it does not reproduce", trained=0)
    training = faults.ReversedColumns(True, ("trainer_forward",))
    ended = vime.run(plant=faults.trainer_runs("qkv_proj", training))
    caught(ended, "step 0, train: the training forward of sample train/", "scoring forward", trained=0)
    recompute = faults.ReversedColumns(True, ("trainer_recompute",))
    ended = vime.run("stages.train.activation_checkpointing=true", plant=faults.trainer_runs("qkv_proj", recompute))
    caught(ended, "step 0, train: layer 1: the recomputed output", trained=0)


def test_log_probabilities_without_the_temperature_are_caught(vime):
    ended = vime.run("stages.rollout.sampling.temperature=0.7", plant=faults.engine_runs("logprob", faults.RawHead()))
    caught(ended, "step 0, compare: ", "the first differing boundary is logprob (logits)", trained=0)
    clean(vime.run("stages.rollout.sampling.temperature=0.7"))


def test_a_tolerated_mismatch_is_in_every_report(vime):
    plant = faults.engine_runs("o_proj", KERNELS["o_proj"])
    ended = vime.run("on_mismatch=continue", plant=plant)
    assert ended.code == 1 and ended.error is None and ended.count("run_finished") == 1
    assert "differ between rollout and trainer" in ended.message
    for report in ended.reports:
        assert report["distribution_mismatch_count"] > 0
        boundary = report["diagnosis"]["boundary"]
        assert (boundary["region"], boundary["layer"]) == ("layers.0.o_proj", 0)
        assert report["worst_token"]["sample"] == report["diagnosis"]["sample"]
    assert sum(report["mismatch_count"] for report in ended.reports) > 0
    written = [json.loads(line) for line in (ended.directory / "steps.jsonl").read_text().splitlines()]
    assert written == json.loads(json.dumps(ended.reports))
    code, printed = vime.call("report", str(ended.directory))
    assert code == 1 and "differ" in printed
    code, printed = vime.call("report", str(ended.directory), "--json")
    assert code == 1 and json.loads(printed.splitlines()[0])["mismatch_count"] is not None
    code, _ = vime.call("resume", str(ended.directory))  # finished: reported again
    assert code == 1


@pytest.mark.parametrize("side", ["rollout", "trainer"])
def test_native_kernels_on_one_side_are_measured(vime, side):
    ended = vime.run(f"numerics.{side}=native", "on_mismatch=continue", "steps=1")
    assert ended.code == 1 and ended.count("run_finished") == 1
    (report,) = ended.reports
    assert report["mismatch_count"] > 0 and report["distribution_mismatch_count"] > 0
    assert 0 < report["max_abs_diff"] < 1e-3
    assert report["diagnosis"]["boundary"]["region"].startswith("layers.0.")
    clean(vime.run("on_mismatch=continue", "steps=1"), steps=1)


def test_sides_of_other_contracts_do_not_start(vime):
    def plant(sides):
        engine = sides.engine.native
        engine._identities = replace(engine._identities, numerical_policy="0" * 64)

    ended = vime.run(plant=plant)
    assert ended.code == 1 and isinstance(ended.error, InvariantViolation)
    assert "do not compute the same function" in ended.message and "numerical_policy" in ended.message
    assert ended.count("version_published") == 0


# ------------------------------------------------------------------------------------------ subnormals


def flushing_reward(prompt: Any, sample: Any, text: str) -> float:
    """A user's function that switches subnormals off for the thread that calls it."""
    if prompt.prompt_index >= 2:
        torch.set_flush_denormal(True)
    return reward(prompt, sample, text)


def test_subnormals_flushed_in_one_worker_thread_are_caught(vime):
    ended = vime.run("threads=2", plant=faults.flush_in_worker)
    caught(ended, "step 0: 1 of 1 worker threads flush subnormal numbers to zero", trained=0)


def test_subnormals_flushed_by_a_reward_are_caught_in_the_same_step(vime, intact_subnormals):
    ended = vime.run(f"stages.reward.function={PUBLIC}.flushing_reward")
    caught(ended, "step 1, score: this thread flushes subnormal numbers to zero", trained=1)


def test_subnormals_flushed_during_generation_are_caught(vime, intact_subnormals):
    ended = vime.run(plant=faults.flush_while_generating)
    caught(ended, "step 0, rollout: this thread flushes subnormal numbers to zero", trained=0)


# ------------------------------------------------------------------------------------------ rewards and filters


def nan_reward(prompt: Any, sample: Any, text: str) -> float:
    """NaN for one sample."""
    return float("nan") if str(sample.sample_id) == "train/0/2" else reward(prompt, sample, text)


def raising_reward(prompt: Any, sample: Any, text: str) -> float:
    """Raises for one sample."""
    if str(sample.sample_id) == "train/0/2":
        raise KeyError("answer")
    return reward(prompt, sample, text)


NEVER = threading.Event()


def late_reward(prompt: Any, sample: Any, text: str) -> float:
    """Waits for something that never happens, for one sample."""
    if str(sample.sample_id) == "train/0/2":
        NEVER.wait()
    return reward(prompt, sample, text)


def text_reward(prompt: Any, sample: Any, text: str) -> Any:
    """Returns no number for one sample."""
    return "good" if str(sample.sample_id) == "train/0/2" else reward(prompt, sample, text)


def tampering_reward(prompt: Any, sample: Any, text: str) -> float:
    """Tries to write into the sample."""
    sample.logprobs[0] = 0.0
    return 1.0


REWARDS = {
    "nan_reward": "it returned nan; a finite number is needed",
    "raising_reward": "it raised KeyError: 'answer'",
    "late_reward": "no answer within 0.2 s",
    "text_reward": "it returned 'good'; a finite number is needed",
    "tampering_reward": "it raised ValueError: assignment destination is read-only",
}


@pytest.mark.parametrize("name", REWARDS)
def test_a_failing_reward_stops_the_run_resumably(vime, name):
    ended = vime.run(f"stages.reward.function={PUBLIC}.{name}", "stages.reward.timeout_s=0.2")
    sample = "train/0/0" if name == "tampering_reward" else "train/0/2"
    caught(ended, f"of sample {sample} failed: {REWARDS[name]}", trained=0, kind=Interrupted, code=3)
    assert f"vime resume {ended.directory}" in ended.message


@pytest.mark.parametrize("name", [name for name in REWARDS if name != "tampering_reward"])
def test_a_failing_reward_drops_its_sample_with_the_reason(vime, name):
    drop = ("stages.reward.on_error=drop", "stages.reward.timeout_s=0.2", "stages.filter.incomplete_group=keep")
    ended = vime.run(f"stages.reward.function={PUBLIC}.{name}", "steps=1", *drop)
    assert (ended.code, ended.error) == (0, None)
    (dropped,) = (event for event in ended.events if isinstance(event, SampleDropped))
    assert (str(dropped.sample_id), dropped.reason) == ("train/0/2", f"reward: {REWARDS[name]}")
    (report,) = ended.reports
    assert report["num_samples"] == 7 and report["dropped_samples"] == {"reward": 1}


def test_an_incomplete_group_is_dropped_as_a_whole_where_so_declared(vime):
    ended = vime.run(f"stages.reward.function={PUBLIC}.nan_reward", "stages.reward.on_error=drop", "steps=1")
    assert ended.code == 0
    dropped = {str(e.sample_id): e.reason for e in ended.events if isinstance(e, SampleDropped)}
    assert set(dropped) == {f"train/0/{k}" for k in range(4)}
    assert dropped["train/0/0"] == "incomplete group: 3 of 4 samples are left"
    (report,) = ended.reports
    assert report["num_samples"] == 4 and report["dropped_samples"] == {"reward": 1, "incomplete group": 3}


def every_reward_fails(prompt: Any, sample: Any, text: str) -> float:
    """NaN always."""
    return float("nan")


def test_a_step_without_samples_trains_on_nothing(vime):
    ended = vime.run(f"stages.reward.function={PUBLIC}.every_reward_fails", "stages.reward.on_error=drop")
    caught(ended, "step 0: all 8 samples were dropped (8 reward)", trained=0, kind=InputError, code=2)


def raising_filter(samples: Any, rewards: Any) -> list[bool]:
    """Raises for the second group."""
    if samples[0].sample_id.prompt_index == 1:
        raise RuntimeError("no judge")
    return [True] * len(samples)


def short_filter(samples: Any, rewards: Any) -> list[bool]:
    """One answer too few."""
    return [True] * (len(samples) - 1)


def choosing_filter(samples: Any, rewards: Any) -> list[bool]:
    """All but the first of each group."""
    return [sample.sample_id.k > 0 for sample in samples]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("raising_filter", "raised RuntimeError for prompt 1: no judge"),
        ("short_filter", "gave 3 answers for 4 samples of prompt 0"),
    ],
)
def test_a_failing_filter_stops_the_run_resumably(vime, name, text):
    caught(vime.run(f"stages.filter.function={PUBLIC}.{name}"), text, trained=0, kind=Interrupted, code=3)


def test_a_filter_that_works_is_logged(vime):
    keep = "stages.filter.incomplete_group=keep"
    ended = vime.run(f"stages.filter.function={PUBLIC}.choosing_filter", keep, "steps=1")
    assert ended.code == 0 and ended.reports[0]["num_samples"] == 6
    dropped = {str(e.sample_id): e.reason for e in ended.events if isinstance(e, SampleDropped)}
    assert set(dropped) == {"train/0/0", "train/1/0"} and all(r.startswith("filter: ") for r in dropped.values())
