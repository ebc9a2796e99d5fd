"""A trainer on plain transformers and FSDP2: it shows that another framework joins without touching vime's internals.

The arithmetic is torch's own (``numerics: native``); what runs is observed by hooks on the framework's modules.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlkernel.contract.canonical import digest
from rlkernel.contract.identity import Identities
from rlkernel.verify.evidence import Evidence
from rlkernel.verify.sentinels import Declaration
from vime.adapters import distribution_digests, file_digest, observed_degrees, own_policy, weights_digest
from vime.errors import InputError
from vime.train.interface import ScoredSample, ScoreResult, TrainResult, TrainSample

STATE = "state.json"
TENSOR_FILES = ("model", "exp_avg", "exp_avg_sq")
MODULES = {
    "embed_tokens": "embedding",
    "input_layernorm": "rms_norm",
    "post_attention_layernorm": "rms_norm",
    "self_attn": "attention",
    "mlp": "swiglu",
    "norm": "final_norm",
    "lm_head": "logprob",
}
"""Name of a module in its parent -> the region that it is counted as; attention and MLP hold their projections."""


def implementation(region: str) -> str:
    """How a region's implementation is called in evidence."""
    return f"transformers.{region}"


def declaration() -> Declaration:
    """What this trainer may run: the modules' regions forward and backward, and torch's AdamW."""
    found = {
        (case, region): implementation(region)
        for case in ("trainer_score", "trainer_forward", "trainer_backward")
        for region in MODULES.values()
    }
    found["optimizer_step", "gradient_norm"] = "torch.clip_grad_norm_"
    found["optimizer_step", "adamw"] = "torch.AdamW"
    return Declaration("the trainer", found)


@contextmanager
def process_group(folder: Path) -> Iterator[None]:
    """A gloo group of this process alone."""
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class FSDP2Trainer:
    """One process or several, on the CPU; needs an initialised process group.

    Args:
        config: contents of the model's ``config.json``.
        tensors: logical tensors under their Hugging Face names, float32.
        semantic: the semantic identity of the contract that both sides were made for.
        temperature: divides the logits.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        *,
        semantic: str,
        temperature: float = 1.0,
        learning_rate: float = 1e-2,
        clip: float = 0.2,
    ) -> None:
        settings = AutoConfig.for_model(**config)
        model = AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa", dtype=torch.float32)
        unfit = model.load_state_dict(dict(tensors), strict=False)
        tied = {"lm_head.weight"} if settings.tie_word_embeddings else set()
        if unfit.unexpected_keys or set(unfit.missing_keys) - tied:
            raise InputError(f"the weights do not fit the model: {unfit}")
        self._names = sorted(tensors)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        self.model = fully_shard(model, mesh=mesh)
        self._vocab_size = int(settings.vocab_size)
        self._temperature, self._rate, self._clip = temperature, learning_rate, clip
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, weight_decay=0.0, foreach=False)
        self._steps = 0
        self._evidence = Evidence("trainer")
        self._case, self._rows = "trainer_score", 0
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        self._identities = Identities(
            semantic,
            own_policy({"trainer": "transformers and FSDP2", "dtype": "float32", **versions}),
            own_policy({"class": "FSDP2Trainer", "device": "cpu", **versions}),
        )
        self._observe()

    def _observe(self) -> None:
        """Count every module that runs, forward and backward, by hooks that see it happen."""
        for path, module in self.model.named_modules():
            region = MODULES.get(path.rpartition(".")[2])
            if region is not None:
                module.register_forward_hook(self._counter(region, backward=False))
                module.register_full_backward_hook(self._counter(region, backward=True))

    def _counter(self, region: str, *, backward: bool) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            case = "trainer_backward" if backward else self._case
            self._evidence.ran(region, case, implementation(region), self._rows)

        return hook

    # identity and weights

    def identities(self) -> Identities:
        return self._identities

    def weights(self) -> Mapping[str, torch.Tensor]:
        parameters = dict(self.model.named_parameters())
        return {name: whole(parameters[name]) for name in self._names}

    def manifest_digest(self) -> str:
        return weights_digest(self.weights())

    # evaluation

    def score(self, samples: Sequence[TrainSample], model: Literal["policy", "reference"] = "policy") -> ScoreResult:
        if model != "policy":
            raise InputError(f"scores of model {model!r} were asked for: this trainer has the policy alone")
        for sample in samples:
            self._check(sample)
        with torch.no_grad():
            scored, tokens = self._evaluate(samples, "trainer_score")
        return ScoreResult(tuple(s for s, _ in scored), "trainer_score", tokens, self.manifest_digest())

    def _evaluate(
        self, samples: Sequence[TrainSample], case: str
    ) -> tuple[list[tuple[ScoredSample, torch.Tensor]], int]:
        """Scores and differentiable log-probabilities, one sequence at a time; and the tokens that went through."""
        result = []
        self._case = case
        before = self._through(case)
        for sample in samples:
            ids = torch.tensor([*sample.prompt_token_ids, *sample.token_ids[:-1]])
            first = len(sample.prompt_token_ids) - 1
            self._rows = len(ids)
            logits = self.model(input_ids=ids[None], use_cache=False).logits[0, first:].float() / self._temperature
            table = F.log_softmax(logits, dim=-1)
            chosen = table.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
            entropies = -(table.exp() * table).sum(-1)
            result.append(
                (
                    ScoredSample(
                        sample.sample_id,
                        chosen.detach().numpy().copy(),
                        distribution_digests(logits),
                        entropies.detach().numpy().copy(),
                    ),
                    chosen,
                )
            )
        return result, self._through(case) - before

    def _through(self, case: str) -> int:
        """Tokens that went through the last norm, and so through every layer."""
        return self._evidence.tokens[("final_norm", case)]

    def _check(self, sample: TrainSample) -> None:
        where, count = f"sample {sample.sample_id}", len(sample.token_ids)
        if not sample.prompt_token_ids or not count:
            raise InputError(f"{where} has no prompt or no response")
        foreign = [t for t in (*sample.prompt_token_ids, *sample.token_ids) if not 0 <= t < self._vocab_size]
        if foreign:
            raise InputError(f"{where} holds the token id {foreign[0]}; the vocabulary has {self._vocab_size}")
        if sample.loss_mask.shape != (count,):
            raise InputError(f"{where} has {count} tokens, and a mask of shape {sample.loss_mask.shape}")
        if not math.isfinite(sample.advantage):
            raise InputError(f"the advantage of {where} is {sample.advantage}")

    # training

    def train(self, step: int, samples: Sequence[TrainSample]) -> TrainResult:
        if step != self._steps:
            raise InputError(f"step {step} was asked for; steps are consecutive, and {self._steps} are done")
        for sample in samples:
            self._check(sample)
            if sample.old_logprobs is None:
                raise InputError(f"sample {sample.sample_id} has no old log-probabilities")
        before = self.manifest_digest()
        trained = sum(int(sample.loss_mask.sum()) for sample in samples)
        if not trained:
            raise InputError("the step has no token to train on")
        scores, tokens, ratios, total = [], 0, [], 0.0
        self._optimizer.zero_grad()
        for sample in samples:
            ((score, logprobs),), through = self._evaluate([sample], "trainer_forward")
            mask = torch.from_numpy(sample.loss_mask)
            ratio = (logprobs - torch.from_numpy(sample.old_logprobs)).exp()  # type: ignore[arg-type]
            bounded = ratio.clamp(1 - self._clip, 1 + self._clip)
            loss = -torch.minimum(ratio * sample.advantage, bounded * sample.advantage)[mask].sum() / trained
            loss.backward()  # gradients of the step add up
            scores.append(score)
            ratios.append(ratio.detach()[mask])
            tokens += through
            total += float(loss.detach())
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)))
        self._evidence.ran("gradient_norm", "optimizer_step", "torch.clip_grad_norm_")
        self._optimizer.step()
        self._evidence.ran("adamw", "optimizer_step", "torch.AdamW")
        self._steps += 1
        seen = torch.cat(ratios)
        return TrainResult(
            loss=total,
            grad_norm=norm,
            learning_rate=self._rate,
            clip_fraction=float(((seen - 1).abs() > self._clip).float().mean()),
            ratio_min=float(seen.min()),
            ratio_max=float(seen.max()),
            updates=1,
            first_forward=ScoreResult(tuple(scores), "trainer_forward", tokens, before),
            gradient_digest=weights_digest({n: whole(p.grad) for n, p in self.model.named_parameters()}),
            facts={"trained_tokens": len(seen)},
        )

    # checkpoints

    def _moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """AdamW's moments by name; zeros before the first step."""
        state = self._optimizer.state
        return {
            kind: {
                name: whole(state[p][kind]) if p in state else torch.zeros(p.shape)
                for name, p in self.model.named_parameters()
            }
            for kind in ("exp_avg", "exp_avg_sq")
        }

    def save(self, folder: Path) -> dict[str, str]:
        folder.mkdir(parents=True, exist_ok=True)
        groups = {"model": dict(self.weights()), **self._moments()}
        digests = {}
        for name in TENSOR_FILES:
            path = folder / f"{name}.safetensors"
            save_file({key: tensor.contiguous() for key, tensor in groups[name].items()}, path, {"format": "pt"})
            digests[path.name] = file_digest(path)
        state = {"steps": self._steps, "numerical_policy": self._identities.numerical_policy, "sha256": digests}
        (folder / STATE).write_text(json.dumps({**state, "own": _text_digest(state)}))
        return {**digests, STATE: file_digest(folder / STATE)}

    def load(self, folder: Path) -> None:
        try:
            state = json.loads((folder / STATE).read_text())
            own = state.pop("own")
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise InputError(f"{folder / STATE} is missing or damaged: {error}") from error
        if own != _text_digest(state):
            raise InputError(f"{folder / STATE} was changed after it was written")
        if state["numerical_policy"] != self._identities.numerical_policy:
            raise InputError(f"{folder} was written by a trainer of other numerics")
        groups = {}
        for name in TENSOR_FILES:
            path = folder / f"{name}.safetensors"
            if not path.is_file() or file_digest(path) != state["sha256"][path.name]:
                raise InputError(f"{path} is missing or damaged")
            try:
                groups[name] = load_file(path)
            except SafetensorError as error:
                raise InputError(f"{path} is no safetensors file: {error}") from error
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                local(parameter).copy_(_shard(groups["model"][name], parameter))
                self._optimizer.state[parameter] = {
                    "step": torch.tensor(float(state["steps"])),
                    **{kind: _like(groups[kind][name], parameter) for kind in ("exp_avg", "exp_avg_sq")},
                }
        self._steps = state["steps"]

    # reports

    def evidence(self) -> dict[str, Any]:
        self._evidence.facts.update(degrees=observed_degrees(dp=dist.get_world_size()))
        return self._evidence.as_json()

    def close(self) -> None:
        """The process group belongs to its maker."""


def whole(tensor: Any) -> torch.Tensor:
    """A copy of the whole tensor, on the CPU."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu().clone()


def local(tensor: Any) -> torch.Tensor:
    """This rank's shard, the memory itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard(full: torch.Tensor, like: Any) -> torch.Tensor:
    """This rank's shard of a whole tensor."""
    return local(_like(full, like))


def _like(full: torch.Tensor, like: Any) -> torch.Tensor:
    """A whole tensor, distributed as another one."""
    if not isinstance(like, DTensor):
        return full.clone()
    return distribute_tensor(full.clone(), like.device_mesh, like.placements)


def _text_digest(state: Mapping[str, Any]) -> str:
    return digest(dict(state))
