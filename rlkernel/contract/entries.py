"""The six points of every region of a dense model. docs/numerics.md says them in words for the portable profile."""

from __future__ import annotations

from dataclasses import replace

from rlkernel.contract.canonical import float32_bits
from rlkernel.contract.claims import Topology
from rlkernel.contract.constants import MAX_LANES
from rlkernel.contract.hostscalars import attention_scales
from rlkernel.contract.points import Dependency, Merge, Precision, RoundingSite, SixPoints, Split
from rlkernel.contract.profiles import ADD, DIV, EXP2, FMA, LOG2, MAX, MUL, SQRT, Profile
from rlkernel.models.config import ModelConfig

VOCABULARY_LEAF = 128
GRADIENT_NORM_LEAF = 1024

# domains of reduction
NONE = "none"
HIDDEN, HEAD_DIM = "hidden axis", "head axis"
KEYS = "keys at positions <= the query's in the same sequence"
VOCABULARY = "real vocabulary without its padding"
TOKENS = "tokens of the step in sample order"
WHOLE_STEPS = ", each sample's filled up with zeros to whole steps"
QUERIES = "q heads of the group, then queries at positions >= the key's"

Primitives = tuple[tuple[str, str], ...]
_ADD, _MUL, _FMA = ("add", ADD), ("mul", MUL), ("fma", FMA)
_DIV, _SQRT, _MAX = ("div", DIV), ("sqrt", SQRT), ("max", MAX)
_EXP2, _LOG2 = ("exp2", EXP2), ("log2", LOG2)


def lanes(n: int) -> int:
    """Strided lanes of a row reduction over n elements: the smallest power of two >= n, at most 256."""
    return min(MAX_LANES, 1 << max(0, (n - 1).bit_length()))


class Entries:
    """Builds the entries of one (model, profile, dtype, topology).

    A region may have several entries: ``KIND.wgrad`` and ``KIND.bias`` are a region's weight gradients, and the region
    ``logprob`` is ``lm_head`` (logits) followed by ``logprob`` (log-softmax, gather, digest).
    """

    def __init__(self, config: ModelConfig, profile: Profile, dtype: str, topology: Topology) -> None:
        self._config, self._profile, self._dtype, self._topology = config, profile, dtype, topology
        self._stream = Precision(dtype, "float32", "float32", "float32", dtype)
        self._scalar = Precision("float32", "float32", "float32", "float32", "float32")
        self._to_stream = (RoundingSite("output", dtype),)
        self._mac = ("mac", profile.mac)

    def _elementwise(self, inputs: tuple[str, ...], primitives: Primitives) -> SixPoints:
        return SixPoints(Dependency(inputs, NONE), Split(), Merge(), self._stream, self._to_stream, primitives)

    def _matmul(self, inputs: tuple[str, ...], domain: str, *, leaves: int = 1, bias: bool = False) -> SixPoints:
        merge = Merge(leaf="ascending_chain", leaves="balanced_tree" if leaves > 1 else "none")
        primitives: Primitives = (self._mac, _ADD) if bias or leaves > 1 else (self._mac,)
        split = Split(leaves=leaves, step=self._profile.step)
        return SixPoints(Dependency(inputs, domain), split, merge, self._stream, self._to_stream, primitives)

    def _row_norm(self, inputs: tuple[str, ...], width: int, primitives: Primitives) -> SixPoints:
        domain = HIDDEN if width == self._config.hidden_size else HEAD_DIM
        merge = Merge(leaf="ascending_chain", lanes="balanced_tree")
        eps = (("eps", float32_bits(self._config.rms_norm_eps)),)
        split = Split(lanes=lanes(width))
        return SixPoints(Dependency(inputs, domain), split, merge, self._stream, self._to_stream, primitives, eps)

    def forward(self) -> dict[str, SixPoints]:
        """Entries of the forward cases, by region kind."""
        c, tp = self._config, self._topology.tp
        norm = (_FMA, _ADD, _MUL, _DIV, _SQRT)
        copied = Precision(self._dtype, self._dtype, self._dtype, self._dtype, self._dtype)
        qkv = ("row", "weight row", "bias") if c.qkv_bias else ("row", "weight row")
        entries = {
            "embedding": SixPoints(
                Dependency(("id", "its row"), NONE), Split(), Merge(), copied, (), (("copy", "copy"),)
            ),
            "rms_norm": self._row_norm(("row", "weight"), c.hidden_size, norm),
            "final_norm": self._row_norm(("row", "weight"), c.hidden_size, norm),
            "qkv_proj": self._matmul(qkv, HIDDEN, bias=c.qkv_bias),
            "rope": self._elementwise(("both halves of the pair", "position"), (_FMA, _MUL)),
            "attention": self._attention(),
            "o_proj": self._matmul(("row", "weight row"), "heads x head axis", leaves=tp),
            "residual_add": self._elementwise(("stream", "branch"), (_ADD,)),
            "gate_up_proj": self._matmul(("row", "weight row"), HIDDEN),
            "swiglu": self._elementwise(("gate", "up"), (_ADD, _MUL, _DIV, _EXP2)),
            "down_proj": self._matmul(("row", "weight row"), "intermediate axis", leaves=tp),
            "lm_head": self._lm_head(),
            "logprob": self._logprob(),
        }
        if c.qk_norm:
            entries["qk_norm"] = self._row_norm(("head row", "weight"), c.head_dim, norm)
        return entries

    def _attention(self) -> SixPoints:
        profile = self._profile
        _, scale2 = attention_scales(self._config.head_dim)
        rounding = (RoundingSite("weights", "bfloat16"),) if self._dtype == "bfloat16" else ()
        several = profile.row_sum_lanes > 1
        return SixPoints(
            Dependency(("query row", "keys", "values"), KEYS),
            Split(leaves=0, leaf_size=profile.key_split, lanes=profile.row_sum_lanes, step=profile.step),
            Merge("ascending_chain", "balanced_tree" if several else "none", "rescale_ascending"),
            self._stream,
            rounding + self._to_stream,
            (
                self._mac,
                ("weights_exp2", profile.attention_exp2(self._dtype)),
                _EXP2, _LOG2, _FMA, _ADD, _MUL, _DIV, _MAX,
            ),
            (("key_block", str(profile.key_block)), ("scale2", float32_bits(float(scale2)))),
        )  # fmt: skip

    def _lm_head(self) -> SixPoints:
        precision = Precision(self._dtype, "float32", "float32", "float32", "float32")
        return replace(self._matmul(("row", "weight row"), HIDDEN), precision=precision, rounding=())

    def _logprob(self) -> SixPoints:
        tp = self._topology.tp
        return SixPoints(
            Dependency(("logits row", "temperature", "target id"), VOCABULARY),
            Split(leaves=0, leaf_size=VOCABULARY_LEAF, shards=tp),
            Merge("balanced_tree", "none", "rescale_ascending", "balanced_tree"),
            self._scalar,
            (),
            (_EXP2, _LOG2, _FMA, _ADD, _MUL, _DIV, _MAX),
            (("padding_multiple", str(VOCABULARY_LEAF * tp)),),
        )

    def backward(self) -> dict[str, SixPoints]:
        """Entries of ``trainer_backward``: the input's gradient by region kind, the weight's as ``KIND.wgrad``."""
        c, tp = self._config, self._topology.tp
        norm = (_FMA, _ADD, _MUL, _DIV)
        rows = ("gradient row", "weights")
        entries = {
            "rms_norm": self._row_norm(("gradient row", "row", "weight"), c.hidden_size, norm),
            "final_norm": self._row_norm(("gradient row", "row", "weight"), c.hidden_size, norm),
            "qkv_proj": self._matmul(rows, "KV groups ascending, each [q heads, k, v]", leaves=tp),
            "rope": self._elementwise(("both halves of the pair", "position"), (_FMA, _MUL)),
            "attention": self._attention_backward(),
            "o_proj": self._matmul(rows, HIDDEN),
            "residual_add": self._elementwise(("gradient of the stream", "gradient of the branch"), (_ADD,)),
            "gate_up_proj": self._matmul(rows, "tp leaves, each [gate, up]", leaves=tp),
            "swiglu": self._elementwise(("gradient", "gate", "up"), (_FMA, _ADD, _MUL, _DIV, _EXP2)),
            "down_proj": self._matmul(rows, HIDDEN),
            "logprob": self._logits_gradient(),
            "lm_head": self._matmul(("d logits row", "head"), "vocabulary shards, each its real ids", leaves=tp),
            "embedding.wgrad": self._weight_gradient(("gradient rows of the id's tokens",), ("add", ADD), 1),
        }
        for kind in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"):
            entries[f"{kind}.wgrad"] = self._weight_gradient(
                ("gradient rows", "input rows"), self._mac, self._profile.step
            )
        if c.qkv_bias:
            entries["qkv_proj.bias"] = self._weight_gradient(("gradient rows",), ("add", ADD), 1)
        for kind in ("rms_norm", "final_norm", *(("qk_norm",) if c.qk_norm else ())):
            entries[f"{kind}.wgrad"] = self._weight_gradient(("gradient rows", "normed rows"), ("mac", FMA), 1)
        if c.qk_norm:
            entries["qk_norm"] = self._row_norm(("gradient row", "head row", "weight"), c.head_dim, norm)
        return entries

    def _logits_gradient(self) -> SixPoints:
        inputs = ("logits row", "its maximum and log-sum", "target id", "coefficient", "temperature")
        # logits stay float32; their gradients go on in the stream's dtype
        precision = Precision("float32", "float32", "float32", "float32", self._dtype)
        primitives = (_MUL, _ADD, _DIV, _EXP2)
        return SixPoints(Dependency(inputs, NONE), Split(), Merge(), precision, self._to_stream, primitives)

    def _weight_gradient(self, inputs: tuple[str, ...], mac: tuple[str, str], step: int) -> SixPoints:
        dp = self._topology.dp
        return SixPoints(
            Dependency(inputs, TOKENS + (WHOLE_STEPS if step > 1 else "")),
            Split(leaves=dp, step=step),
            Merge(leaf="ascending_chain", leaves="balanced_tree" if dp > 1 else "none"),
            Precision(self._dtype, "float32", "float32", "float32", "float32"),
            (),
            (mac,) if mac[0] == "add" else (mac, _ADD),
        )

    def _attention_backward(self) -> SixPoints:
        scale, scale2 = attention_scales(self._config.head_dim)
        narrow = self._dtype == "bfloat16"
        sites = (RoundingSite("weights", "bfloat16"), RoundingSite("score gradients", "bfloat16")) if narrow else ()
        return SixPoints(
            Dependency(("query, key, value and gradient rows",), f"dq: {KEYS}; dk, dv: {QUERIES}"),
            Split(step=self._profile.step),
            Merge(leaf="ascending_chain"),
            self._stream,
            sites + self._to_stream,
            (self._mac, ("weights_exp2", self._profile.attention_exp2(self._dtype)), _FMA, _ADD, _MUL),
            (("scale", float32_bits(float(scale))), ("scale2", float32_bits(float(scale2)))),
        )

    def optimizer(self) -> dict[str, SixPoints]:
        """Entries of ``optimizer_step``."""
        return {
            "gradient_norm": SixPoints(
                Dependency(("all gradients",), "logical tensors in name order"),
                Split(leaves=0, leaf_size=GRADIENT_NORM_LEAF, lanes=MAX_LANES),
                Merge("ascending_chain", "balanced_tree", "balanced_tree", "ascending_chain"),
                self._scalar,
                (),
                (_FMA, _ADD, _SQRT, _DIV),
            ),
            "loss": SixPoints(
                Dependency(("the token's log-probabilities, advantage and weight",), NONE),
                Split(),
                Merge(),
                self._scalar,
                (),
                (_FMA, _ADD, _MUL, _EXP2),
            ),
            "adamw": SixPoints(
                Dependency(("gradient", "moments", "master weight"), NONE),
                Split(),
                Merge(),
                Precision("float32", "float32", "float32", "float32", self._dtype),
                (RoundingSite("model weight", self._dtype),),
                (_FMA, _ADD, _MUL, _DIV, _SQRT),
            ),
        }
