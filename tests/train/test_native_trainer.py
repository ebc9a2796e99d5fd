"""The native trainer with the real model: bits that may not change, and faults that have to be caught."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlkernel.contract.schedules import Schedule
from rlkernel.errors import ContractError, NumericsError
from tests.train.helpers import IDENTITIES, MODEL, runner, samples, tensors, trainer, with_old
from vime.errors import InputError
from vime.train.batching import required_rows
from vime.train.losses import LossConfig
from vime.train.native.optimizer import AdamW, OptimizerConfig
from vime.train.native.trainer import TrainerConfig, leaf_blocks


def bits(array):
    return np.asarray(array, np.float32).view(np.uint32).tolist()


def same_scores(left, right):
    assert [s.sample_id for s in left] == [s.sample_id for s in right]
    return all(
        bits(a.logprobs) == bits(b.logprobs) and a.digests.tolist() == b.digests.tolist()
        for a, b in zip(left, right, strict=True)
    )


def outcome(**config):
    subject = trainer(**config)
    batch = with_old(subject, samples())
    results = [subject.train(step, batch) for step in range(2)]
    return [r.gradient_digest for r in results], [r.loss for r in results], subject.manifest_digest()


@pytest.fixture(scope="module")
def baseline():
    return outcome()


@pytest.mark.parametrize(
    "config",
    [
        {"micro_batch_samples": 1},
        {"micro_batch_samples": 4},
        {"activation_checkpointing": True},
        {"threads": 2},
        {"micro_batch_samples": 2, "activation_checkpointing": True, "threads": 2},
    ],
    ids=str,
)
def test_how_the_work_is_cut_changes_no_bit(baseline, config):
    assert outcome(**config) == baseline


def test_what_is_part_of_the_definition_does_change_bits(baseline):
    assert outcome(data_parallel_leaves=2)[0][0] != baseline[0][0]
    assert outcome(updates_per_step=3)[2] != baseline[2]
    assert outcome(temperature=1.25)[2] != baseline[2]


def test_leaves_of_the_dp_claim_are_independent_of_micro_batches():
    one = outcome(data_parallel_leaves=2, micro_batch_samples=1)
    assert one == outcome(data_parallel_leaves=2, micro_batch_samples=64)
    assert leaf_blocks(range(10, 17), 4) == [range(10, 11), range(11, 13), range(13, 15), range(15, 17)]
    assert leaf_blocks(range(0, 1), 2) == [range(0, 0), range(0, 1)]


def test_the_training_forward_has_the_bits_of_the_scores_and_ratios_of_one():
    subject = trainer(micro_batch_samples=2)
    batch = with_old(subject, samples())
    scores, before = subject.score(batch), subject.manifest_digest()
    result = subject.train(0, batch)
    first = result.first_forward
    assert same_scores(scores.samples, first.samples)
    assert (first.case, first.manifest_digest, scores.manifest_digest) == ("trainer_forward", before, before)
    assert first.forward_tokens == scores.forward_tokens == sum(map(required_rows, batch))
    assert result.ratio_min == result.ratio_max == 1.0
    after = subject.score(batch)
    assert not same_scores(after.samples, first.samples) and after.manifest_digest != before


def test_old_logprobs_of_other_weights_give_other_ratios():
    subject, other = trainer(), trainer(seed=1)
    result = subject.train(0, with_old(other, samples()))
    assert result.ratio_min < 1.0 < result.ratio_max and 0 < result.clip_fraction <= 1


def test_first_forward_holds_only_what_the_old_weights_saw():
    subject = trainer(updates_per_step=3)
    batch = with_old(subject, samples())
    result = subject.train(0, batch)
    assert [s.sample_id for s in result.first_forward.samples] == [s.sample_id for s in batch[:2]]
    assert result.first_forward.forward_tokens == sum(map(required_rows, batch[:2]))
    assert result.updates == 3 and result.facts["first_update_ratio_max"] == 1.0 != result.ratio_max


def test_a_scored_sample_does_not_depend_on_its_batch():
    subject = trainer()
    whole = subject.score(samples()).samples
    for sample, score in zip(samples(), whole, strict=True):
        assert same_scores(subject.score([sample]).samples, [score])


def test_reference_scores_come_from_the_reference():
    reference = runner(tensors(seed=1), training=False)
    loss = LossConfig("reinforce", kl="k3", kl_coefficient=0.1)
    subject = trainer(loss=loss, reference=reference)
    batch = samples()
    scored = subject.score(batch, "reference")
    assert scored.manifest_digest == reference.weights.manifest_digest() != subject.manifest_digest()
    assert not same_scores(scored.samples, subject.score(batch).samples)
    with pytest.raises(InputError, match=r"train/0/0 has no reference log-probabilities"):
        subject.train(0, batch)
    batch = [replace(s, reference_logprobs=r.logprobs) for s, r in zip(batch, scored.samples, strict=True)]
    assert subject.train(0, batch).facts["reference_kl"] > 0
    with pytest.raises(InputError, match="got none"):
        trainer(loss=loss)
    with pytest.raises(InputError, match="has none"):
        trainer().score(batch, "reference")


def test_rewarded_tokens_become_more_likely():
    subject = trainer(loss=LossConfig("reinforce"))
    batch = [replace(s, advantage=1.0) for s in samples(1, 2)]
    before = [float(s.logprobs.sum()) for s in subject.score(batch).samples]
    for step in range(3):
        result = subject.train(step, batch)
    assert json.loads(json.dumps(result.facts, allow_nan=False))["first_update_ratio_min"] is None
    after = [float(s.logprobs.sum()) for s in subject.score(batch).samples]
    assert all(a > b + 0.5 for a, b in zip(after, before, strict=True))


def test_masked_tokens_do_not_train():
    batch = samples()
    masked = [replace(s, loss_mask=np.zeros(len(s.token_ids), bool)) if i else s for i, s in enumerate(batch)]
    results = []
    for change in (0.0, 5.0):
        subject = trainer(loss=LossConfig("reinforce"))
        results.append(subject.train(0, [replace(s, advantage=s.advantage + (i > 0) * change) for i, s in
                                         enumerate(masked)]).gradient_digest)  # fmt: skip
    assert results[0] == results[1]
    subject = trainer(loss=LossConfig("reinforce"))
    assert subject.train(0, batch).gradient_digest != results[0]


def test_bfloat16_weights_stay_on_their_grid_and_keep_a_float32_master():
    subject = trainer("bfloat16", micro_batch_samples=2)
    batch = with_old(subject, samples())
    subject.train(0, batch)
    again = trainer("bfloat16", activation_checkpointing=True)
    again.train(0, with_old(again, samples()))
    assert subject.manifest_digest() == again.manifest_digest()
    weights, master = subject.weights(), subject._optimizer.state().master
    assert all(str(t.dtype) == "torch.bfloat16" for t in weights.values())
    assert any((weights[name].float().numpy() != master[name]).any() for name in weights)


def test_weights_that_are_handed_out_are_copies():
    subject = trainer()
    before = subject.manifest_digest()
    subject.weights()["model.norm.weight"].fill_(3.0)
    assert subject.manifest_digest() == before


def test_a_flipped_bit_in_the_packed_weights_is_caught():
    subject = trainer()
    subject._model.weights.vectors["model.norm.weight"].view(np.uint32)[3] ^= np.uint32(1)
    with pytest.raises(NumericsError, match="bytes changed"):
        subject.score(samples())


def test_flushed_denormals_are_caught_before_anything_is_computed():
    subject = trainer()
    batch = with_old(subject, samples())
    torch.set_flush_denormal(True)
    try:
        for request in (lambda: subject.score(batch), lambda: subject.train(0, batch)):
            with pytest.raises(NumericsError, match="flushes subnormal numbers"):
                request()
    finally:
        torch.set_flush_denormal(False)
    assert subject.train(0, batch).updates == 1


def test_a_nan_names_sample_token_and_position_and_changes_nothing():
    weights = tensors()
    weights["model.embed_tokens.weight"][7] = float("nan")
    subject = trainer(loss=LossConfig("reinforce"))
    subject._tensors = weights
    subject._model.weights.update(weights)
    subject._optimizer.state().master["model.embed_tokens.weight"][7] = np.float32("nan")
    batch = samples()
    first = batch[0]
    batch[0] = replace(first, prompt_token_ids=(1, 7))
    with pytest.raises(NumericsError, match=rf"sample {first.sample_id}, response token 0 \(position 2\) is nan"):
        subject.train(0, batch)
    assert subject.updates == 0 and subject.steps == 0


def flip_row_panel(subject):
    subject._model.weights._rows["layers.0.qkv_proj"].data.view(np.uint32).flat[3] ^= np.uint32(1)
    return "packed weights have digest"


def flip_column_panel(subject):
    subject._model.weights._columns["layers.0.qkv_proj"].data.view(np.uint32).flat[3] ^= np.uint32(1)
    return "the packed columns of layers.0.qkv_proj, which the backward reads, changed"


def flip_master(subject):
    subject._optimizer.state().master["model.layers.0.mlp.down_proj.weight"].view(np.uint32).flat[9] ^= np.uint32(1)
    return "element 9 of model.layers.0.mlp.down_proj.weight is not its float32 master"


@pytest.mark.parametrize("flip", [flip_row_panel, flip_column_panel, flip_master])
def test_one_flipped_bit_of_any_copy_of_a_weight_stops_the_step(flip):
    subject = trainer()
    batch = with_old(subject, samples())
    message = flip(subject)
    with pytest.raises(NumericsError, match=message):
        subject.train(0, batch)
    assert subject.updates == 0


def test_a_recomputation_with_other_bits_is_caught():
    subject = trainer(activation_checkpointing=True)
    batch = with_old(subject, samples())
    model = subject._model
    forward = model.forward

    def tampered(*args, **kwargs):
        tape = forward(*args, **kwargs)
        tape.checkpoints[1].view(np.uint32).flat[5] ^= np.uint32(1)
        return tape

    model.forward = tampered
    with pytest.raises(NumericsError, match="layer 1: the recomputed output"):
        subject.train(0, batch)


def test_bad_requests_are_sentences():
    subject = trainer()
    batch = samples()
    with pytest.raises(InputError, match="train/0/0 has no old log-probabilities"):
        subject.train(0, batch)
    batch = with_old(subject, batch)
    with pytest.raises(InputError, match="step 3 was asked for, but the trainer has done 0"):
        subject.train(3, batch)
    with pytest.raises(InputError, match="advantage of sample train/0/0 is nan"):
        subject.train(0, [replace(batch[0], advantage=float("nan")), *batch[1:]])
    with pytest.raises(InputError, match="every loss mask is empty"):
        subject.train(0, [replace(s, loss_mask=np.zeros(len(s.token_ids), bool)) for s in batch])
    with pytest.raises(InputError, match="policy and reference exist"):
        subject.score(batch, "critic")
    with pytest.raises(InputError, match="micro_batch_samples = 0"):
        TrainerConfig(OptimizerConfig(Schedule(1e-3)), micro_batch_samples=0)


def test_a_resumed_trainer_has_the_bits_of_an_uninterrupted_one(tmp_path):
    optimizer = OptimizerConfig(Schedule(1e-2, "cosine", 1, 6), weight_decay=0.01)
    straight = trainer(optimizer=optimizer)
    for step in range(2):
        straight.train(step, with_old(straight, samples(seed=step)))
    files = straight.save(tmp_path / "checkpoint")
    assert set(files) == {"model.safetensors", "master.safetensors", "moment1.safetensors", "moment2.safetensors",
                          "trainer.json"}  # fmt: skip
    resumed = trainer(optimizer=optimizer, seed=9)
    assert resumed.manifest_digest() != straight.manifest_digest()
    resumed.load(tmp_path / "checkpoint")
    assert resumed.manifest_digest() == straight.manifest_digest() and resumed.steps == 2
    last = [subject.train(2, with_old(subject, samples(seed=2))) for subject in (straight, resumed)]
    assert last[0].gradient_digest == last[1].gradient_digest and last[0].learning_rate == last[1].learning_rate
    assert straight.manifest_digest() == resumed.manifest_digest()
    assert straight.save(tmp_path / "one") == resumed.save(tmp_path / "two")


def damage_truncate(folder):
    path = folder / "moment2.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    return r"moment2.safetensors .*truncated"


def damage_bit(folder):
    path = folder / "master.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return r"master.safetensors .*changed"


def damage_missing(folder):
    (folder / "model.safetensors").unlink()
    return r"model.safetensors is missing"


def damage_no_state(folder):
    (folder / "trainer.json").unlink()
    return r"trainer.json is missing"


def edit(folder, **changes):
    path = folder / "trainer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def damage_powers(folder):
    edit(folder, beta_powers=["0x1.0p-1", "0x1.0p-1"])
    return r"beta powers"


def damage_updates(folder):
    edit(folder, updates=2)
    return r"beta powers .* after 2 updates"


def damage_contract(folder):
    edit(folder, identities={**IDENTITIES.as_json(), "numerical_policy": "f" * 64})
    return r"numerical_policy identity is ffff"


def damage_dtype(folder):
    edit(folder, dtype="bfloat16")
    return r"dtype bfloat16"


def damage_text(folder):
    (folder / "trainer.json").write_text("{")
    return r"cannot be read"


def damage_key(folder):
    (folder / "trainer.json").write_text("{}")
    return r"lacks format"


@pytest.mark.parametrize("damage", [v for k, v in sorted(globals().items()) if k.startswith("damage_")])
def test_a_damaged_checkpoint_is_refused_and_nothing_is_taken(tmp_path, damage):
    saved = trainer()
    saved.train(0, with_old(saved, samples()))
    saved.save(tmp_path)
    message = damage(tmp_path)
    other = trainer(seed=4)
    before = other.manifest_digest()
    with pytest.raises(InputError, match=message):
        other.load(tmp_path)
    assert other.manifest_digest() == before and other.steps == 0 and other.updates == 0


def test_tensors_of_another_model_are_listed(tmp_path):
    from safetensors.torch import load_file, save_file

    from vime.train.native.state import file_sha256

    saved = trainer()
    saved.save(tmp_path)
    path = tmp_path / "master.safetensors"
    content = load_file(path)
    content["extra"] = content.pop("model.norm.weight")
    content["model.layers.0.mlp.down_proj.weight"] = content["model.layers.0.mlp.down_proj.weight"].T.contiguous()
    save_file(content, path)
    digests = json.loads((tmp_path / "trainer.json").read_text())["sha256"]
    edit(tmp_path, sha256={**digests, path.name: file_sha256(path)})
    with pytest.raises(InputError) as caught:
        saved.load(tmp_path)
    for text in (
        "3 tensors do not fit",
        "model.norm.weight is missing",
        "extra is not a tensor",
        "[48, 32]",
        "[32, 48]",
    ):
        assert text in str(caught.value)


def test_another_optimizer_configuration_is_refused(tmp_path):
    trainer().save(tmp_path)
    with pytest.raises(InputError, match="keeps its configuration"):
        trainer(optimizer=OptimizerConfig(Schedule(2e-2))).load(tmp_path)


def test_the_optimizer_refuses_gradients_that_do_not_fit_or_are_not_finite():
    from rlkernel.kernels.cpu.threads import Workers

    weights = tensors()
    subject = AdamW(OptimizerConfig(Schedule(1e-2)), weights, "float32", Workers(1))
    gradients = {name: np.zeros(shape, np.float32) for name, shape in MODEL.weight_shapes().items()}
    with pytest.raises(ContractError, match="extra"):
        subject.update({**gradients, "extra": np.zeros(1, np.float32)})
    with pytest.raises(ContractError, match=r"missing for \['model.norm.weight'\]"):
        subject.update({name: g for name, g in gradients.items() if name != "model.norm.weight"})
    gradients["model.norm.weight"][5] = np.inf
    with pytest.raises(NumericsError, match=r"model.norm.weight is inf at element 5"):
        subject.update(gradients)
    assert subject.updates == 0
    assert all(bits(subject.state().master[n]) == bits(t.numpy()) for n, t in weights.items())


@pytest.mark.parametrize(
    "arguments",
    [{"beta1": 1.0}, {"beta2": -0.1}, {"eps": 0.0}, {"weight_decay": -1.0}, {"max_grad_norm": 0.0}, {"eps": 1e-60}],
)
def test_impossible_optimizers_are_refused(arguments):
    with pytest.raises(InputError):
        OptimizerConfig(Schedule(1e-3), **arguments)
