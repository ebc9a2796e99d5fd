"""Planted faults, each through the whole loop and the command line: caught, named, and nothing trained on it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlkernel.errors import NumericsError
from rlkernel.models.tokenizer import character_tokenizer
from tests.runtime import faults
from tests.runtime.helpers import caught, clean
from vime.timeline.events import StepCompared, StepTrained, SyncRolledBack

PUBLIC = "tests.runtime.test_faults"


# ------------------------------------------------------------------------------------------ no fault


def test_without_a_fault_the_run_is_clean(vime):
    """The negative twin of everything below."""
    clean(vime.run("stages.evaluate.prompts=2"))
    clean(vime.run("threads=2"))


# ------------------------------------------------------------------------------------------ versions, caches


def test_an_engine_that_stays_behind_is_caught_at_the_commit(vime):
    ended = vime.run(plant=faults.does_not_commit)
    caught(ended, "step 0, sync: engine native-0 serves version 0", "published was version 1", trained=1)


def test_old_weights_under_the_new_label_are_caught_before_anything_is_scored(vime):
    ended = vime.run(plant=faults.serves_old_weights_under_the_new_label)
    caught(ended, "step 0, sync: engine native-0 serves version 1 with digest", "published was version 1", trained=1)
    assert ended.count("sync_committed") == 1  # that of version 0


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
        (faults.flip_served_weight, ["step 0, rollout: engine native-0 serves version 0 with digest"], 0),
        (faults.flip_kv, ["step 0, compare: ", "it is the rollout's array that it does not reproduce"], 0),
        (faults.flip_trainer_rows, ["step 0, score: the trainer's packed weights have digest"], 0),
        (faults.flip_trainer_columns, ["step 0, train: the packed columns of layers.0.o_proj"], 0),
        (faults.flip_trainer_master, ["step 0, train: element 3 of model.norm.weight is not its float32 master"], 0),
    ],
)
def test_one_flipped_bit_is_caught(vime, plant, texts, trained):
    caught(vime.run(plant=plant), *texts, trained=trained)


def test_a_bit_flipped_before_the_first_publication_is_noted_too(vime):
    ended = vime.run(plant=lambda sides: faults.flip(sides.trainer._model.weights._rows["layers.0.o_proj"].data))
    caught(ended, "the trainer's packed weights have digest", trained=0, kind=NumericsError)


def test_a_bit_flipped_during_an_evaluation_is_caught_there(vime):
    ended = vime.run("stages.evaluate.prompts=2", plant=faults.flip_served_weight)
    caught(ended, "evaluation of version 0: engine native-0 serves version 0 with digest", trained=0)


@pytest.mark.parametrize("transport", ["memory", "shm", "disk", "disk_delta"])
@pytest.mark.parametrize("change", [faults.flip_in_transit, faults.swap_in_transit])
def test_weights_that_arrive_otherwise_are_rolled_back(vime, transport, change):
    ended = vime.run(f"stages.sync.transport={transport}", plant=faults.changes_in_transit(change))
    caught(
        ended,
        "engine native-0 staged version 0 with digest",
        "published was version 0",
        "the bytes of tensor",
        trained=0,
    )
    (rolled_back,) = (event for event in ended.events if isinstance(event, SyncRolledBack))
    assert "staged version 0 with digest" in rolled_back.reason
    assert ended.count("sync_staged") == 1 and ended.count("sync_committed") == ended.count("sample_started") == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda tensors: tensors.update(scale=tensors["model.norm.weight"]), "scale is not a tensor of this model"),
        (faults.transpose_in_transit, "lm_head.weight has shape"),
        (faults.narrow_in_transit, "model.norm.weight is torch.bfloat16, the contract says float32"),
    ],
)
def test_missing_extra_and_unfitting_tensors_are_refused(vime, change, text):
    ended = vime.run(plant=faults.changes_in_transit(change))
    caught(ended, "engine native-0: what arrived of version 0 is refused: 1 tensors do not fit", text, trained=0)
    assert ended.count("sync_staged") == ended.count("sample_started") == 0


# ------------------------------------------------------------------------------------------ copied arrays


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"copy": False, "work": True, "unknown": "forward"}, "share memory with the rollout's"),
        ({"copy": True, "work": False, "unknown": "forward"}, "its evidence shows"),
        ({"copy": True, "work": True, "unknown": "forward"}, "are not a forward over these tokens"),
        ({"copy": True, "work": True, "unknown": "omit"}, "the trainer returned 0 scores of train/"),
        ({"copy": True, "work": True, "unknown": "other"}, "differ between rollout and trainer"),
    ],
)
def test_the_rollouts_array_in_place_of_the_trainers_is_caught(vime, options, text):
    ended = vime.run(plant=faults.returns_rollout_arrays(**options))
    caught(ended, "step 0, ", text, trained=0)
    # a copy is equal to what it was copied from: the log must never say that it was compared and equal
    compared = [event for event in ended.events if isinstance(event, StepCompared)]
    assert all(event.mismatch_count for event in compared) and len(compared) == (options["unknown"] == "other")


def test_a_copying_trainer_is_caught_where_mismatches_are_tolerated(vime):
    plant = faults.returns_rollout_arrays(copy=True, work=True, unknown="forward")
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
    tokens = (first.token_ids[0] ^ 1, *first.token_ids[1:])
    return [replace(first, token_ids=tokens, text=character_tokenizer().decode(tokens)), *samples[1:]]


def shortened(samples):
    def cut(sample):
        count = len(sample.token_ids) - 1
        arrays = {name: getattr(sample, name)[:count].copy() for name in faults.SAMPLE_ARRAYS}
        runs, tokens = (replace(sample.versions[0], count=count),), sample.token_ids[:count]
        return replace(sample, token_ids=tokens, text=character_tokenizer().decode(tokens), versions=runs, **arrays)

    return [cut(sample) if len(sample.token_ids) > 1 else sample for sample in samples]


def other_reason(samples):
    return [replace(sample, finish_reason="context") for sample in samples]


def other_text(samples):
    return [replace(sample, text="9999") for sample in samples]


def other_entropy(samples):
    return [replace(samples[0], entropies=samples[0].entropies * np.float32(0.5)), *samples[1:]]


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
        (shortened, ["sample train/0/0 ends after", "no stop token or string ended it"]),
        (other_reason, ["sample train/0/0 says that it ended with 'context'; it ended with"]),
        (other_text, ["sample train/0/0 came with the text '9999'; its tokens are"]),
        (old_version, ["train/0/0", "tokens carry version -1", "(invariant 3)"]),
        (other_token, ["step 0, compare: ", "the worst is sample train/0/0"]),
        (
            other_entropy,
            ["step 0, compare: sample train/0/0, position 2", "the entropies", "is not that of its distrib"],
        ),
    ],
)
def test_a_wrong_sample_is_caught(vime, change, texts):
    caught(vime.run(plant=faults.changes_samples(change)), *texts, trained=0)


EVALUATED = ("stages.evaluate.prompts=4", "stages.evaluate.greedy=true")


def of_evaluations(change):
    """Alters the samples of evaluations alone."""
    return faults.changes_samples(lambda made: change(made) if made[0].sample_id.namespace == "eval" else made)


def flipped_scores(samples):
    return [faults.with_array(s, "logprobs", (s.logprobs.view(np.uint32) ^ 1).view(np.float32)) for s in samples]


def turned(samples):
    """Every sample is another one's."""
    moved = [*samples[1:], samples[0]]
    return [
        replace(m, sample_id=s.sample_id, prompt_token_ids=s.prompt_token_ids)
        for s, m in zip(samples, moved, strict=True)
    ]


@pytest.mark.parametrize("change", [flipped_scores, turned])
def test_a_wrong_evaluation_is_caught(vime, change):
    ended = vime.run(*EVALUATED, plant=of_evaluations(change))
    caught(ended, "evaluation of version 0: ", "compared tokens differ between rollout and trainer", trained=0)


def test_an_engine_that_draws_where_the_largest_was_asked_for_is_caught(vime):
    def plant(sides):
        engine = sides.engine.native
        whole = engine.generate
        engine.generate = lambda requests: whole([replace(r, params=replace(r.params, greedy=False)) for r in requests])

    ended = vime.run(*EVALUATED, plant=plant)
    caught(ended, "evaluation of version 0: sample eval/", "says that it drew token", trained=0)


def test_an_evaluation_says_what_was_compared(vime):
    ended = vime.run(*EVALUATED)
    found = [event.metrics for event in ended.events if event.type == "evaluated"]
    assert found and all(metrics["compared_tokens"] > metrics["redrawn_tokens"] > 0 for metrics in found)
    assert all(metrics["mismatch_count"] == metrics["distribution_mismatch_count"] == 0 for metrics in found)


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


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_entropies_of_the_trainer_are_compared_too(vime, policy):
    plant = faults.changes_scores(lambda s: replace(s, entropies=s.entropies + np.float32(1)))
    ended = vime.run(f"on_mismatch={policy}", plant=plant)
    caught(ended, "step 0, compare: sample train/0/0", "the same distribution, bit for bit, but", trained=0)
