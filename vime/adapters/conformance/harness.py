"""How the suite makes, damages and questions the adapter under test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlkernel.contract.identity import Identities
from rlkernel.errors import ContractError
from rlkernel.verify.sentinels import Counts, Declaration, Duty, missing, read_counts, undeclared
from vime.adapters.conformance.rules import Broken, expect
from vime.errors import InputError
from vime.train.interface import ScoredSample, TrainSample
from vime.types import SampleId

LARGEST_VOCABULARY = 1024
CLOSE = 1e-3
"""How far log-probabilities of a side with numerics of its own may lie apart where the function is the same."""


@dataclass(frozen=True)
class Harness:
    """What both suites need.

    Args:
        make: a new adapter; every call gives the same initial state. Several may live at a time.
        corrupt: flip one bit of the weights that the adapter computes with (served weights, for an engine).
        vocab_size: of the small model under test, at most 1,024: sums over whole distributions are checked.
        declared: what may run, as :func:`rlkernel.verify.sentinels.declare` or by hand.
        exact: the adapter keeps the contract: equal functions give equal bits. Otherwise they are close.
    """

    make: Callable[[], Any]
    corrupt: Callable[[Any], None]
    vocab_size: int
    declared: Declaration
    exact: bool

    def __post_init__(self) -> None:
        if not 2 <= self.vocab_size <= LARGEST_VOCABULARY:
            raise InputError(
                f"a vocabulary of {self.vocab_size} tokens: the suite checks whole distributions, so that 2 to "
                f"{LARGEST_VOCABULARY} are needed; make a smaller model"
            )

    def agree(self, one: NDArray[np.float32], other: NDArray[np.float32]) -> bool:
        """Whether two results of the same function agree: in every bit where exact, closely otherwise."""
        if one.shape != other.shape:
            return False
        if self.exact:
            return bool((one.view(np.uint32) == other.view(np.uint32)).all())
        return bool((np.abs(one.astype(np.float64) - other.astype(np.float64)) <= CLOSE).all())

    def samples(self, seed: int = 0) -> list[TrainSample]:
        """Three groups of two sequences of several lengths, in sample order, all tokens trained, without old values."""
        random = np.random.default_rng(seed)
        result = []
        for prompt in range(3):
            question = tuple(int(t) for t in random.integers(0, self.vocab_size, 3 + prompt))
            for k in range(2):
                tokens = tuple(int(t) for t in random.integers(0, self.vocab_size, 3 + (prompt + 2 * k) % 4))
                advantage = 1.0 if k else -1.0
                result.append(
                    TrainSample(
                        SampleId("train", prompt, k), question, tokens, np.ones(len(tokens), np.bool_), advantage
                    )
                )
        return result

    def judge(self, before: Counts, after: Counts, duties: Sequence[Duty]) -> None:
        """Raise :class:`Broken` unless all that ran in between is declared, and the duties are done."""
        counts = after.since(before)
        problems = undeclared(self.declared, counts) + missing(self.declared, counts, duties)
        expect(not problems, "; ".join(problems[:3]))


@dataclass(frozen=True)
class TrainerHarness(Harness):
    """A trainer under test. ``make`` gives trainers that have done no step, with a learning rate above 0.

    ``checkpointing``: its backward recomputes activations.
    """

    checkpointing: bool = False


@dataclass(frozen=True)
class EngineHarness(Harness):
    """An engine under test.

    ``make`` gives engines without committed weights. ``tensors(seed)`` are whole sets of logical tensors, different
    for every seed. Sequences of up to ``longest`` tokens are generated. ``block_size`` is that of its cache.
    """

    tensors: Callable[[int], Mapping[str, torch.Tensor]] = lambda seed: {}
    longest: int = 64
    block_size: int = 16


def check_identities(make: Callable[[], Any]) -> None:
    """All three digests are shown, and are the same at every call and in every adapter of the same make."""
    one, other = make(), make()
    shown = [one.identities(), one.identities(), other.identities()]
    for identities in shown:
        expect(isinstance(identities, Identities), f"identities() returned {identities!r}")
        try:
            Identities(**identities.as_json())
        except ContractError as error:
            raise Broken(str(error)) from error
    expect(shown[0] == shown[1] == shown[2], f"they changed from {shown[0]} to {shown[1]} and {shown[2]}")


def counts_of(adapter: Any) -> Counts:
    """The adapter's evidence as counts. Raises :class:`Broken` where it cannot be read."""
    try:
        return read_counts(adapter.evidence())
    except ContractError as error:
        raise Broken(str(error)) from error


def check_arrays(sample: ScoredSample, count: int, where: str) -> None:
    """Shapes and dtypes, and values that log-probabilities and entropies can have."""
    for name, dtype, shape in (
        ("logprobs", np.float32, (count,)),
        ("digests", np.uint64, (count, 2)),
        ("entropies", np.float32, (count,)),
    ):
        array = getattr(sample, name)
        expect(
            isinstance(array, np.ndarray) and array.dtype == dtype and array.shape == shape,
            f"{where}: {name} are {getattr(array, 'dtype', type(array).__name__)} of shape "
            f"{list(getattr(array, 'shape', ()))}; {np.dtype(dtype).name} of shape {list(shape)} is due",
        )
    expect(bool(np.isfinite(sample.logprobs).all()), f"{where}: a log-probability is not finite")
    expect(bool((sample.logprobs <= CLOSE).all()), f"{where}: a log-probability is {sample.logprobs.max()}, above 0")
    expect(bool((sample.entropies >= -CLOSE).all()), f"{where}: an entropy is {sample.entropies.min()}, below 0")


def with_token(sample: TrainSample, index: int, token: int) -> TrainSample:
    """The sample with another response token at an index."""
    tokens = (*sample.token_ids[:index], token, *sample.token_ids[index + 1 :])
    return replace(sample, token_ids=tokens)


def single_tokens(vocab_size: int, prompt: tuple[int, ...]) -> list[TrainSample]:
    """One sample a token of the vocabulary: the whole distribution after a prompt."""
    return [
        TrainSample(SampleId("train", 0, token), prompt, (token,), np.ones(1, np.bool_)) for token in range(vocab_size)
    ]


def check_distribution(scored: Sequence[ScoredSample]) -> None:
    """The scores of :func:`single_tokens` are one distribution: it sums to 1, has one digest and its own entropy."""
    logprobs = np.array([sample.logprobs[0] for sample in scored], np.float64)
    total = float(np.exp(logprobs).sum())
    expect(abs(total - 1.0) <= CLOSE, f"the probabilities of all {len(scored)} tokens after one prompt sum to {total}")
    entropy = float(-(np.exp(logprobs) * logprobs).sum())
    shown = float(scored[0].entropies[0])
    expect(abs(entropy - shown) <= 10 * CLOSE, f"the entropy of a distribution is {entropy}; {shown} is reported")
