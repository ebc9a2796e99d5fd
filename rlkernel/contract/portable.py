"""The six points of every region of a dense model in the portable profile. docs/numerics.md says them in words."""

from __future__ import annotations

from rlkernel.contract.canonical import float32_bits
from rlkernel.contract.claims import Topology
from rlkernel.contract.hostscalars import attention_scales
from rlkernel.contract.points import Dependency, Merge, Precision, RoundingSite, SixPoints, Split
from rlkernel.models.config import ModelConfig

KEY_BLOCK = 64
KEY_SPLIT = 512
VOCABULARY_LEAF = 128
MAX_LANES = 256
GRADIENT_NORM_LEAF = 1024

FMA, ADD, MUL, DIV, SQRT, MAX = "fma.rn.f32", "add.rn.f32", "mul.rn.f32", "div.rn.f32", "sqrt.rn.f32", "max.f32"
EXP2, EXP2_P3, LOG2 = "exp2.full", "exp2.p3", "log2.full"
CHAIN = Merge(leaf="ascending_chain")


def lanes(n: int) -> int:
    """Strided lanes of a row reduction over n elements: the smallest power of two >= n, at most 256."""
    return min(MAX_LANES, 1 << max(0, (n - 1).bit_length()))


class PortableEntries:
    """Builds the entries of one (model, dtype, topology)."""

    def __init__(self, config: ModelConfig, dtype: str, topology: Topology) -> None:
        self._config, self._dtype, self._topology = config, dtype, topology
        self._stream = Precision(dtype, "float32", "float32", "float32", dtype)
        self._to_stream = (RoundingSite("output", dtype),)

    def _elementwise(self, inputs: tuple[str, ...], primitives: tuple[str, ...], **constants: str) -> SixPoints:
        none = Dependency(inputs, "none")
        pairs = tuple(sorted(constants.items()))
        return SixPoints(none, Split(), Merge(), self._stream, self._to_stream, primitives, pairs)

    def _chain(
        self, inputs: tuple[str, ...], domain: str, *, leaves: int = 1, output: str | None = None, bias: bool = False
    ) -> SixPoints:
        precision = Precision(self._dtype, "float32", "float32", "float32", output or self._dtype)
        merge = Merge(leaf="ascending_chain", leaves="balanced_tree" if leaves > 1 else "none")
        primitives = (FMA, ADD) if bias or leaves > 1 else (FMA,)
        rounding = (RoundingSite("output", output or self._dtype),)
        return SixPoints(Dependency(inputs, domain), Split(leaves=leaves), merge, precision, rounding, primitives)

    def _row_norm(self, inputs: tuple[str, ...], width: int, primitives: tuple[str, ...]) -> SixPoints:
        merge = Merge(leaf="ascending_chain", lanes="balanced_tree")
        eps = (("eps", float32_bits(self._config.rms_norm_eps)),)
        split = Split(lanes=lanes(width))
        return SixPoints(
            Dependency(inputs, "hidden axis"), split, merge, self._stream, self._to_stream, primitives, eps
        )

    def forward(self) -> dict[str, SixPoints]:
        """Entries of the forward cases, by region kind."""
        c, tp = self._config, self._topology.tp
        norm = (FMA, ADD, MUL, DIV, SQRT)
        entries = {
            "embedding": SixPoints(
                Dependency(("token id", "its table row"), "none"),
                Split(),
                Merge(),
                Precision(self._dtype, self._dtype, self._dtype, self._dtype, self._dtype),
                (),
                ("copy",),
            ),
            "rms_norm": self._row_norm(("row", "weight"), c.hidden_size, norm),
            "final_norm": self._row_norm(("row", "weight"), c.hidden_size, norm),
            "qkv_proj": self._chain(("row", "weight row", "bias"), "hidden axis", bias=c.qkv_bias),
            "rope": self._elementwise(("both halves of the pair", "position"), (FMA, MUL)),
            "attention": self._attention(),
            "o_proj": self._chain(("row", "weight row"), "heads x head_dim", leaves=tp),
            "residual_add": self._elementwise(("stream", "branch"), (ADD,)),
            "gate_up_proj": self._chain(("row", "weight row"), "hidden axis"),
            "swiglu": self._elementwise(("gate", "up"), (ADD, MUL, DIV, EXP2)),
            "down_proj": self._chain(("row", "weight row"), "intermediate axis", leaves=tp),
            "logprob": self._logprob(),
        }
        if c.qk_norm:
            entries["qk_norm"] = self._row_norm(("head row", "weight"), c.head_dim, norm)
        return entries

    def _attention(self) -> SixPoints:
        bf16 = self._dtype == "bfloat16"
        _, scale2 = attention_scales(self._config.head_dim)
        rounding = (RoundingSite("weights P", "bfloat16"),) if bf16 else ()
        return SixPoints(
            Dependency(("query row", "keys and values at positions <= the query's, same sequence"), "keys"),
            Split(leaf_size=KEY_SPLIT, step=1, shards=1, lanes=1, leaves=0),
            Merge(leaf="ascending_chain", leaves="rescale_ascending"),
            self._stream,
            rounding + self._to_stream,
            (FMA, ADD, MUL, DIV, MAX, EXP2, LOG2) + ((EXP2_P3,) if bf16 else ()),
            (("key_block", str(KEY_BLOCK)), ("scale2", float32_bits(float(scale2)))),
        )

    def _logprob(self) -> SixPoints:
        tp = self._topology.tp
        return SixPoints(
            Dependency(("hidden row", "head", "temperature", "target id"), "real vocabulary without its padding"),
            Split(leaf_size=VOCABULARY_LEAF, leaves=0, shards=tp),
            Merge("ascending_chain", "balanced_tree", "rescale_ascending", "balanced_tree"),
            Precision(self._dtype, "float32", "float32", "float32", "float32"),
            (),
            (FMA, ADD, MUL, DIV, MAX, EXP2, LOG2),
            (("padding_multiple", str(VOCABULARY_LEAF * tp)),),
        )

    def backward(self) -> dict[str, SixPoints]:
        """Entries of ``trainer_backward``, by region kind (dgrad; the wgrad is ``KIND.wgrad``)."""
        c, tp = self._config, self._topology.tp
        norm = (FMA, ADD, MUL, DIV)
        entries = {
            "rms_norm": self._row_norm(("gradient row", "row", "weight"), c.hidden_size, norm),
            "final_norm": self._row_norm(("gradient row", "row", "weight"), c.hidden_size, norm),
            "qkv_proj": self._chain(("gradient row", "weights"), "KV groups, each [q heads, k, v]", leaves=tp),
            "rope": self._elementwise(("both halves of the pair", "position"), (FMA, MUL)),
            "attention": self._attention_backward(),
            "o_proj": self._chain(("gradient row", "weights"), "hidden axis"),
            "residual_add": self._elementwise(("gradient of the stream", "gradient of the branch"), (ADD,)),
            "gate_up_proj": self._chain(("gradient row", "weights"), "tp leaves, each [gate, up]", leaves=tp),
            "swiglu": self._elementwise(("gradient", "gate", "up"), (FMA, ADD, MUL, DIV, EXP2)),
            "down_proj": self._chain(("gradient row", "weights"), "hidden axis"),
            "logprob": self._chain(("d logits row", "head"), "vocabulary shards", leaves=tp),
            "embedding.wgrad": self._weight_gradient(("tokens of the id", "gradient rows"), (ADD,)),
        }
        for kind in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "logprob", "rms_norm", "final_norm"):
            entries[f"{kind}.wgrad"] = self._weight_gradient(("tokens of the step",), (FMA, ADD))
        if c.qk_norm:
            entries["qk_norm"] = self._row_norm(("gradient row", "head row", "weight"), c.head_dim, norm)
            entries["qk_norm.wgrad"] = self._weight_gradient(("tokens of the step, then heads",), (FMA, ADD))
        return entries

    def _weight_gradient(self, inputs: tuple[str, ...], primitives: tuple[str, ...]) -> SixPoints:
        dp = self._topology.dp
        return SixPoints(
            Dependency(inputs, "tokens of the step in sample order"),
            Split(leaves=dp),
            Merge(leaf="ascending_chain", leaves="balanced_tree" if dp > 1 else "none"),
            Precision(self._dtype, "float32", "float32", "float32", "float32"),
            (),
            primitives,
        )

    def _attention_backward(self) -> SixPoints:
        scale, scale2 = attention_scales(self._config.head_dim)
        bf16 = self._dtype == "bfloat16"
        sites = (RoundingSite("weights P", "bfloat16"), RoundingSite("score gradients dS", "bfloat16")) if bf16 else ()
        return SixPoints(
            Dependency(
                ("query, key, value, gradient rows of the sequence",), "dq: keys; dk, dv: q heads, then queries"
            ),
            Split(),
            CHAIN,
            self._stream,
            sites + self._to_stream,
            (FMA, ADD, MUL, EXP2) + ((EXP2_P3,) if bf16 else ()),
            (("scale", float32_bits(float(scale))), ("scale2", float32_bits(float(scale2)))),
        )

    def optimizer(self) -> dict[str, SixPoints]:
        """Entries of ``optimizer_step``."""
        master = Precision("float32", "float32", "float32", "float32", self._dtype)
        scalar = Precision("float32", "float32", "float32", "float32", "float32")
        return {
            "gradient_norm": SixPoints(
                Dependency(("all gradients",), "logical tensors in name order"),
                Split(leaf_size=GRADIENT_NORM_LEAF, leaves=0, lanes=MAX_LANES),
                Merge("ascending_chain", "balanced_tree", "balanced_tree", "ascending_chain"),
                scalar,
                (),
                (FMA, ADD, SQRT, DIV),
            ),
            "loss": SixPoints(
                Dependency(("the token's log-probabilities and advantage", "trained tokens of the step"), "none"),
                Split(),
                Merge(),
                scalar,
                (),
                (FMA, ADD, MUL, DIV, EXP2),
            ),
            "adamw": SixPoints(
                Dependency(("gradient", "moments", "master weight"), "none"),
                Split(),
                Merge(),
                master,
                (RoundingSite("model weight", self._dtype),),
                (FMA, ADD, MUL, DIV, SQRT),
            ),
        }
