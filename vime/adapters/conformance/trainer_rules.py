"""What holds of every trainer."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlkernel.contract.claims import Topology
from rlkernel.contract.decode import decode
from rlkernel.errors import RlkernelError
from rlkernel.verify.sentinels import Duty
from vime.adapters.conformance.harness import (
    TrainerHarness,
    check_arrays,
    check_distribution,
    check_identities,
    counts_of,
    single_tokens,
    with_token,
)
from vime.adapters.conformance.rules import Broken, ConformanceReport, Rule, check_rules, expect, expect_raises
from vime.adapters.interface import TRAINER_FACTS
from vime.adapters.tools import file_digest, weights_digest
from vime.errors import InputError, VimeError
from vime.mismatch.independence import TRAINER_CASES
from vime.train.batching import required_rows
from vime.train.interface import ScoredSample, ScoreResult, TrainResult, TrainSample


def _ready(trainer: Any, samples: list[TrainSample]) -> list[TrainSample]:
    """The samples with the trainer's own log-probabilities as the old ones."""
    own = trainer.score(samples).samples
    return [replace(s, old_logprobs=score.logprobs.copy()) for s, score in zip(samples, own, strict=True)]


def _identities(h: TrainerHarness) -> None:
    check_identities(h.make)


def _weights(h: TrainerHarness) -> None:
    trainer = h.make()
    digest, weights = trainer.manifest_digest(), trainer.weights()
    expect(bool(weights), "weights() is empty")
    for name, tensor in weights.items():
        expect(type(tensor) is torch.Tensor and tensor.device.type == "cpu", f"{name} is no whole tensor on the CPU")
    for tensor in weights.values():
        tensor.zero_()
    expect(trainer.manifest_digest() == digest, "writing into what weights() returned changed the trainer's own")
    expect(weights_digest(trainer.weights()) == digest, "weights() returns what an earlier caller wrote into")


def _digest(h: TrainerHarness) -> None:
    trainer = h.make()
    digest = trainer.manifest_digest()
    expect(digest == weights_digest(trainer.weights()), f"it is {digest}; the bytes of weights() have another")
    h.corrupt(trainer)
    try:
        after = trainer.manifest_digest()
    except (RlkernelError, VimeError):
        return  # it noticed, and says so
    expect(after != digest, "a bit of the weights was flipped and the digest stayed: it is a label, not read off bytes")


def _check_scores(result: ScoreResult, samples: list[TrainSample]) -> dict[Any, ScoredSample]:
    asked, given = [s.sample_id for s in samples], [s.sample_id for s in result.samples]
    lost = [str(i) for i in asked if i not in given]
    expect(not lost, f"samples were lost: {', '.join(lost)}")
    expect(given == asked, "the scores are not in the order of the request")
    for sample, score in zip(samples, result.samples, strict=True):
        check_arrays(score, len(sample.token_ids), f"score of {sample.sample_id}")
    return {score.sample_id: score for score in result.samples}


def _scores(h: TrainerHarness) -> None:
    trainer, samples = h.make(), h.samples()
    result = trainer.score(samples)
    forward = _check_scores(result, samples)
    backward = _check_scores(trainer.score(samples[::-1]), samples[::-1])
    for sample_id, score in forward.items():
        expect(
            h.agree(score.logprobs, backward[sample_id].logprobs),
            f"the scores of {sample_id} depend on its place in the request",
        )
        alone = trainer.score([next(s for s in samples if s.sample_id == sample_id)]).samples[0]
        expect(h.agree(score.logprobs, alone.logprobs), f"the scores of {sample_id} depend on its neighbours")
    expect(result.case in TRAINER_CASES, f"the scores come from case {result.case!r}; due is one of {TRAINER_CASES}")
    expect(result.manifest_digest == trainer.manifest_digest(), "manifest_digest is not that of the trainer's weights")


def _tokens(h: TrainerHarness) -> None:
    trainer, samples = h.make(), h.samples()
    own = {s.sample_id: s for s in trainer.score(samples).samples}
    noise = [replace(s, old_logprobs=np.full(len(s.token_ids), -1.5, np.float32), advantage=7.0) for s in samples]
    for score in trainer.score(noise).samples:
        expect(
            h.agree(score.logprobs, own[score.sample_id].logprobs),
            f"the scores of {score.sample_id} follow the log-probabilities that came with the request",
        )
    first, second = samples[0], next(s for s in samples[1:] if len(s.token_ids) == len(samples[0].token_ids))
    swapped = [replace(first, sample_id=second.sample_id), replace(second, sample_id=first.sample_id)]
    answers = trainer.score(swapped).samples
    for score, origin in zip(answers, (first, second), strict=True):
        expect(
            h.agree(score.logprobs, own[origin.sample_id].logprobs),
            f"two samples changed names, and the scores follow the names: {score.sample_id} is answered from memory",
        )
    token = (first.token_ids[0] + 1) % h.vocab_size
    changed = trainer.score([with_token(first, 0, token)]).samples[0]
    original = own[first.sample_id]
    expect(
        bool((changed.digests[1:] != original.digests[1:]).any(axis=1).all()),
        "a response token was replaced, and a distribution after it stayed: later tokens do not see it",
    )
    if h.exact:
        expect(
            bool((changed.digests[0] == original.digests[0]).all()),
            "a response token was replaced, and the distribution that it was drawn from changed: it sees the future",
        )


def _distribution(h: TrainerHarness) -> None:
    trainer = h.make()
    scored = trainer.score(single_tokens(h.vocab_size, (1, 0, 1))).samples
    check_distribution(scored)
    if h.exact:
        expect(
            all((s.digests[0] == scored[0].digests[0]).all() for s in scored), "one distribution has several digests"
        )


def _score_evidence(h: TrainerHarness) -> None:
    trainer, samples = h.make(), h.samples()
    before = counts_of(trainer)
    result = trainer.score(samples)
    after = counts_of(trainer)
    h.judge(before, after, [Duty((result.case,), sum(len(s.token_ids) for s in samples))])
    needed = sum(required_rows(s) for s in samples)
    seen = max(n for (case, _), n in after.since(before).tokens.items() if case == result.case)
    expect(
        needed <= result.forward_tokens <= seen,
        f"forward_tokens is {result.forward_tokens}; {needed} tokens have to be evaluated, and its evidence has {seen}",
    )


def _steps(h: TrainerHarness) -> None:
    trainer = h.make()
    samples = _ready(trainer, h.samples())
    before = trainer.manifest_digest()
    expect_raises(InputError, lambda: trainer.train(1, samples), "step 1 before step 0")
    expect(trainer.manifest_digest() == before, "a refused step changed the weights")
    trainer.train(0, samples)
    expect_raises(InputError, lambda: trainer.train(0, samples), "step 0 twice")
    trainer.train(1, samples)


def _check_result(h: TrainerHarness, result: TrainResult, samples: list[TrainSample], before: str) -> None:
    for name in ("loss", "grad_norm", "learning_rate"):
        value = getattr(result, name)
        expect(isinstance(value, float) and np.isfinite(value), f"{name} is {value!r}: a finite float is due")
    expect(result.updates >= 1, f"updates is {result.updates}")
    tokens, told = sum(int(np.count_nonzero(s.loss_mask)) for s in samples), result.facts.get("trained_tokens")
    expect(told == tokens, f"the fact trained_tokens is {told}; the step trains on {tokens} tokens")
    first = result.first_forward
    if first is None:
        raise Broken("first_forward is missing: nothing shows what the training forward computed")
    expect(first.manifest_digest == before, "first_forward used other weights than those before the step")
    given, asked = [s.sample_id for s in first.samples], [s.sample_id for s in samples]
    # with several updates, only the first one's samples were evaluated with the weights before the step
    due = asked if result.updates == 1 else asked[: len(given)]
    expect(bool(given) and given == due, f"first_forward has {len(given)} samples, and not the first update's in order")
    for sample, score in zip(samples, first.samples, strict=False):
        check_arrays(score, len(sample.token_ids), f"first_forward of {sample.sample_id}")
        assert sample.old_logprobs is not None
        expect(
            h.agree(score.logprobs, sample.old_logprobs),
            f"the training forward of {score.sample_id} differs from its score",
        )


def _training(h: TrainerHarness) -> None:
    trainer = h.make()
    samples = _ready(trainer, h.samples())
    before = trainer.manifest_digest()
    result = trainer.train(0, samples)
    _check_result(h, result, samples, before)
    after = trainer.manifest_digest()
    expect(after != before, "a step with gradients left the weights as they were")
    expect(after == weights_digest(trainer.weights()), "after a step the digest is not that of the published bytes")
    gained = {s.sample_id: float(s.logprobs.astype(np.float64).sum()) for s in trainer.score(samples).samples}
    gain = sum(
        s.advantage * (gained[s.sample_id] - float(s.old_logprobs.astype(np.float64).sum()))
        for s in samples
        if s.old_logprobs is not None
    )
    expect(
        gain > 0, f"after a step the log-probabilities moved against the advantages (by {gain:.3g} in their direction)"
    )


def _mask(h: TrainerHarness) -> None:
    def trained(token: int) -> Any:
        trainer = h.make()
        samples = h.samples()
        last = len(samples[0].token_ids) - 1
        mask = samples[0].loss_mask.copy()
        mask[last] = False
        samples[0] = replace(with_token(samples[0], last, token), loss_mask=mask)
        trainer.train(0, _ready(trainer, samples))
        return trainer

    one, other = trained(0), trained(1)
    if h.exact:
        expect(one.manifest_digest() == other.manifest_digest(), "a token that the mask leaves out changed the weights")
    theirs = other.weights()
    for name, tensor in one.weights().items():
        difference = float((tensor.double() - theirs[name].double()).abs().max())
        expect(difference <= 1e-5, f"a token that the mask leaves out changed {name} by {difference:.3g}")


def _train_evidence(h: TrainerHarness) -> None:
    trainer = h.make()
    samples = _ready(trainer, h.samples())
    before = counts_of(trainer)
    result = trainer.train(0, samples)
    rows = sum(len(s.token_ids) for s in samples) if result.updates == 1 else 1
    cases = ["trainer_backward", "optimizer_step", *(["trainer_recompute"] if h.checkpointing else [])]
    h.judge(before, counts_of(trainer), [Duty(("trainer_forward",), rows), *(Duty((case,)) for case in cases)])


def _refusals(h: TrainerHarness) -> None:
    trainer = h.make()
    samples = _ready(trainer, h.samples())
    before, good = trainer.manifest_digest(), samples[0]
    outside = h.vocab_size
    bad = {
        "a sample without response tokens": replace(
            good, token_ids=(), loss_mask=np.ones(0, np.bool_), old_logprobs=np.ones(0, np.float32)
        ),
        "a sample without prompt": replace(good, prompt_token_ids=()),
        "a loss mask of another length": replace(good, loss_mask=np.ones(len(good.token_ids) + 1, np.bool_)),
        f"the response token {outside} outside the vocabulary": with_token(good, 0, outside),
        f"the prompt token {outside} outside the vocabulary": replace(good, prompt_token_ids=(0, outside)),
        "an advantage that is NaN": replace(good, advantage=float("nan")),
    }
    for what, sample in bad.items():
        if "advantage" not in what:
            expect_raises((VimeError, RlkernelError), partial(trainer.score, [sample]), f"score: {what}")
        expect_raises((VimeError, RlkernelError), partial(trainer.train, 0, [sample, *samples[1:]]), f"train: {what}")
    expect_raises((VimeError, RlkernelError), lambda: trainer.score(samples, "other"), "the scores of model 'other'")
    expect(trainer.manifest_digest() == before, "a refused sample changed the weights")
    trainer.train(0, samples)


def _checkpoint(h: TrainerHarness) -> None:
    trainer = h.make()
    samples = h.samples()
    trainer.train(0, _ready(trainer, samples))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkpoint"
        files = trainer.save(folder)
        expect(bool(files), "save() names no files")
        written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        expect(written == set(files), f"save() names {sorted(files)}, and wrote {sorted(written)}")
        for file, digest in files.items():
            expect(file_digest(folder / file) == digest, f"the SHA-256 of {file} is not that of the file")
        other = h.make()
        other.load(folder)
    expect(
        other.manifest_digest() == trainer.manifest_digest(), "the loaded weights have other bits than the saved ones"
    )
    expect_raises(InputError, lambda: other.train(0, _ready(other, samples)), "step 0 after a checkpoint of step 0")
    for one in (trainer, other):
        one.train(1, _ready(one, samples))
    if h.exact:
        same = trainer.manifest_digest() == other.manifest_digest()
        expect(same, "the step after loading has other bits than the uninterrupted one: state is missing")
    theirs = other.weights()
    for key, tensor in trainer.weights().items():
        difference = float((tensor.double() - theirs[key].double()).abs().max())
        expect(
            difference <= 1e-5, f"the step after loading moved {key} elsewhere, by {difference:.3g}: state is missing"
        )


def _damage(h: TrainerHarness) -> None:
    trainer = h.make()
    trainer.train(0, _ready(trainer, h.samples()))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkpoint"
        files = trainer.save(folder)
        other = h.make()
        before = other.manifest_digest()
        for file in files:
            path = folder / file
            content = path.read_bytes()
            middle = len(content) // 2
            path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
            expect_raises(InputError, lambda: other.load(folder), f"a checkpoint with a flipped bit in {file}")
            path.unlink()
            expect_raises(InputError, lambda: other.load(folder), f"a checkpoint without {file}")
            path.write_bytes(content)
        expect(other.manifest_digest() == before, "a refused checkpoint changed the weights")
        other.load(folder)


def _evidence(h: TrainerHarness) -> None:
    trainer = h.make()
    trainer.score(h.samples())
    evidence = trainer.evidence()
    check_evidence_form(evidence, TRAINER_FACTS)


def check_evidence_form(evidence: Any, facts: tuple[str, ...]) -> None:
    """Evidence is plain data with its parts, and has the facts that claims are checked by."""
    try:
        json.dumps(evidence)
    except (TypeError, ValueError) as error:
        raise Broken(f"evidence() is no plain data: {error}") from error
    expect(isinstance(evidence, dict), f"evidence() is {evidence!r}")
    lacking = sorted({"owner", "calls", "facts", "refused"} - set(evidence))
    expect(not lacking, f"evidence() has no {', '.join(lacking)}")
    lacking = [name for name in facts if name not in evidence["facts"]]
    expect(not lacking, f"evidence has no fact {', '.join(lacking)}: claims cannot be checked by it")
    decode(Topology, evidence["facts"]["degrees"], "degrees")


def _repeatable(h: TrainerHarness) -> None:
    digests = set()
    for _ in range(2):
        trainer = h.make()
        for step in range(2):
            trainer.train(step, _ready(trainer, h.samples(step)))
        digests.add(trainer.manifest_digest())
    expect(len(digests) == 1, "two trainers with the same start and the same samples ended with other bits")


TRAINER_RULES: tuple[Rule, ...] = (
    Rule("identities", "all three identities are shown and stay", _identities),
    Rule("weights", "published weights are whole copies", _weights),
    Rule("digest", "the digest is recomputed from bytes", _digest),
    Rule("scores", "scores are complete, in order, and independent of neighbours", _scores),
    Rule("tokens", "scores are a forward over the tokens, and nothing else", _tokens),
    Rule("distribution", "log-probabilities are those of a distribution", _distribution),
    Rule("score evidence", "what a score took is in the evidence, and declared", _score_evidence),
    Rule("steps", "steps are consecutive", _steps),
    Rule("training", "a step trains on every sample, from the published weights, along the advantages", _training),
    Rule("mask", "a token that is not trained on has no gradient", _mask),
    Rule("training evidence", "forward, backward and optimizer are in the evidence, and declared", _train_evidence),
    Rule("refusals", "impossible samples are refused and change nothing", _refusals),
    Rule("checkpoint", "what is saved and loaded goes on with the same state", _checkpoint),
    Rule("damage", "a damaged or incomplete checkpoint is refused and changes nothing", _damage),
    Rule("evidence", "evidence is plain data with the facts of the claims", _evidence),
)

EXACT_TRAINER_RULES: tuple[Rule, ...] = (Rule("repeatable", "the same work has the same bits", _repeatable),)
"""Rules of trainers that keep the contract, beside the others."""


def check_trainer(harness: TrainerHarness) -> ConformanceReport:
    """Check every rule that the harness is subject to."""
    return check_rules(TRAINER_RULES + (EXACT_TRAINER_RULES if harness.exact else ()), harness)
