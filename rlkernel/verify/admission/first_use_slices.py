"""Small parts of live operands, executed again from the contract's entries: what the first-use check compares with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlkernel.contract.build import Contract
from rlkernel.contract.entries import VOCABULARY_LEAF
from rlkernel.contract.points import SixPoints
from rlkernel.contract.profiles import FMA
from rlkernel.kernels.cpu.convert import as_float32, narrow, widen
from rlkernel.kernels.cpu.panels import Panels, unpack_row
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.models.definition import Region
from rlkernel.ops.host import Host
from rlkernel.reference.arith import cast, div, mul, sub
from rlkernel.reference.attention import attend, attend_backward
from rlkernel.reference.head import statistics
from rlkernel.reference.lookup import primitive
from rlkernel.reference.primitives import LOG2E
from rlkernel.reference.regions import ReferenceNorm
from rlkernel.verify.admission import plain
from rlkernel.verify.admission.bits import Results

Array = NDArray[np.float32]
Rows = NDArray[np.int64]
NORMS = ("rms_norm", "final_norm", "qk_norm")
FEATURES = 64  # output features of a projection that are executed again
CORNER = 12  # rows and columns of a weight's gradient
WINDOW = 48  # rows at the beginning and end of a longer one
WHOLE = 512  # longest sequence whose attention gradients are all executed again, for two heads of keys
ATTENTION_GRADIENTS = ("gradient of the queries", "gradient of the keys", "gradient of the values")


@dataclass(frozen=True)
class Slices:
    """Rows that were executed again, what they have to give, and how to cut the same out of an implementation's."""

    rows: list[int]
    expected: Results
    found: Callable[[Sequence[Any]], Results]


class PlainNorm(ReferenceNorm):
    """The interpreter's norm, whose chain over all rows of a batch is the plain kernel's: one call for each row is not
    feasible over a hundred thousand rows (heads are rows too)."""

    def _continued(self, wgrad: SixPoints, dy: torch.Tensor, xh: torch.Tensor, running: torch.Tensor) -> torch.Tensor:
        if wgrad.primitive("mac") != FMA:
            return super()._continued(wgrad, dy, xh, running)
        a, b, start = (as_float32(x.detach().cpu().contiguous()) for x in (dy, xh, running))
        found = plain.side_by_side(a, b, start, Workers(1))
        return torch.from_numpy(found).to(running.device)


def _some(count: int, most: int) -> Rows:
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def _rounded(values: Array, host: Host) -> Array:
    return widen(narrow(values)) if host.bf16 else values


def _matrix(x: Array) -> Array:
    return np.ascontiguousarray(x.reshape(len(x), int(np.prod(x.shape[1:]))))


def _leaves(region: Region, host: Host) -> int:
    return host.tp if region.kind in ("o_proj", "down_proj") else 1


def _fused(outputs: Sequence[Array]) -> Array:
    return np.concatenate([_matrix(x) for x in outputs], axis=1)


def linear_slice(
    contract: Contract, region: Region, x: Array, outputs: Sequence[Array], rows: Rows, host: Host
) -> tuple[Results, Results]:
    """Some rows and features of a projection: (expected, found)."""
    panels: Panels = host.weights.rows(region)
    features = _some(panels.rows, FEATURES)
    again = plain.chains(_matrix(x[rows]), unpack_row(panels, features), _leaves(region, host), host.workers)
    bias = host.weights.biases.get(region.name)
    if bias is not None:
        again = again + bias[features]
    found = _fused([part[rows] for part in outputs])[:, features]
    return {"projection": _rounded(again, host)}, {"projection": np.ascontiguousarray(found)}


def linear_backward_slice(
    contract: Contract, region: Region, x: Array, grads: Sequence[Array], rows: Rows, host: Host
) -> Slices:
    """Some elements of a projection's gradients of input and weights."""
    panels: Panels = host.weights.columns(region)
    places = _some(panels.rows, FEATURES)
    fused = _fused([g[rows] for g in grads])
    if len(grads) > 1:
        fused = np.ascontiguousarray(fused[:, host.weights.dgrad_rows(region)])
    split = contract.entries[("trainer_backward", region.kind)].split
    dx = _rounded(plain.chains(fused, unpack_row(panels, places), split.leaves, host.workers), host)
    expected: dict[str, Any] = {"gradient of the input": dx}
    assert host.gradients is not None
    gradients, parts = host.gradients, {}
    for name, grad in zip([n for n in region.weights if n.endswith(".weight")], grads, strict=True):
        buffer = gradients.buffer(name)
        n, k = _some(buffer.shape[0], CORNER), _some(buffer.shape[1], CORNER)
        parts[name] = np.ix_(n, k)
        dy, inputs = _matrix(grad)[:, n], _matrix(x)[:, k]
        expected[f"gradient of {name}"] = plain.continued(
            np.ascontiguousarray(dy), np.ascontiguousarray(inputs), buffer[parts[name]], host.workers
        )
    biases = [name for name in region.weights if name.endswith(".bias")]
    for name, grad in zip(biases, grads, strict=bool(biases)):
        expected[f"gradient of {name}"] = _added(gradients.buffer(name), _matrix(grad))

    def found(result: Sequence[Any]) -> Results:
        own = {
            f"gradient of {name}": np.ascontiguousarray(gradients.buffer(name)[part]) for name, part in parts.items()
        }
        own |= {f"gradient of {name}": gradients.buffer(name).copy() for name in biases}
        return {"gradient of the input": np.ascontiguousarray(_matrix(result[0][rows])[:, places]), **own}

    return Slices(rows.tolist(), expected, found)


def _added(start: Array, rows: Array) -> Array:
    """``start`` with every row added in order, a new array."""
    total = start.copy()
    for row in rows:
        total = total + row
    return total


def embedding_backward_slice(region: Region, ids: NDArray[np.int64], grad: Array, host: Host) -> Slices:
    """The gradient rows of some of the batch's ids, the least, the largest, the first and the last among them: an id's
    rows added in token order.
    """
    assert host.gradients is not None
    buffer = host.gradients.embedding(region.weights[0])
    present = np.unique(ids)
    tokens = np.unique(np.concatenate([present[_some(len(present), CORNER)], ids[[0, -1]]]))
    expected = np.stack([_added(buffer[token], grad[ids == token]) for token in tokens])
    return Slices([], {"gradient of ids": expected}, lambda _: {"gradient of ids": buffer[tokens].copy()})


def _keys(
    region: Region, inputs: Sequence[Array], sequence: int, length: int, head: int, host: Host
) -> tuple[Array, Array]:
    """Keys and values [length, D] of a KV head, from the pages or the batch."""
    _, k, v = inputs
    if host.state is None:
        first = int(host.batch.starts[sequence])
        return k[first : first + length, head], v[first : first + length, head]
    assert region.layer is not None
    k_pages, v_pages = host.state.pages(region.layer)
    j = np.arange(length)
    page, offset = host.state.block_table[sequence][j // host.state.page_size], j % host.state.page_size
    return k_pages[page, head, :, offset], v_pages[page, head, offset, :]


def _tensor(x: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))


def attention_slice(
    contract: Contract, region: Region, inputs: Sequence[Array], outputs: Sequence[Array], host: Host
) -> tuple[Rows, Results, Results]:
    """The first head of the row with the fewest keys, the last of the one with the most, the middle one of the last
    row: (rows, expected, found).
    """
    points = contract.entries[(host.case, "attention")]
    positions, last = host.batch.positions, host.config.num_heads - 1
    rows, heads = [int(np.argmin(positions)), int(np.argmax(positions)), len(positions) - 1], [0, last, last // 2]
    group = host.config.num_heads // host.config.num_kv_heads
    expected = []
    for row, head in zip(rows, heads, strict=True):
        sequence = int(np.searchsorted(host.batch.starts, row, side="right")) - 1
        k, v = _keys(region, inputs, sequence, int(positions[row]) + 1, head // group, host)
        place = torch.tensor([int(positions[row])])
        out, _ = attend(points, _tensor(inputs[0][row, head][None]), _tensor(k), _tensor(v), place)
        expected.append(out.numpy()[0])
    found = np.ascontiguousarray(outputs[0][rows, heads])
    return np.array(rows), {"attended": np.stack(expected)}, {"attended": found}


def attention_backward_slice(
    contract: Contract, inputs: Sequence[Array], out: Array, grad: Array, host: Host
) -> Slices:
    """dq, dk and dv of the longest sequence, for the first and the last head of keys; where it is longer than WHOLE, dq
    of its first and last rows, dk and dv of its last keys.
    """
    points = contract.entries[("trainer_backward", "attention")]
    forward = contract.entries[("trainer_forward", "attention")]
    lengths = np.diff(host.batch.starts)
    chosen = int(np.argmax(lengths))
    first, length = int(host.batch.starts[chosen]), int(lengths[chosen])
    group = host.config.num_heads // host.config.num_kv_heads
    q, k, v = inputs
    heads = sorted({0, host.config.num_kv_heads - 1})

    def gradients(head: int, begin: int, end: int, first_key: int) -> tuple[Any, Any, Any]:
        """By the query rows [begin, end), of keys from ``first_key`` on that they alone may see."""
        keys, values = (_tensor(side[first : first + length, head]) for side in (k, v))
        rows, places = slice(first + begin, first + end), torch.arange(begin, end)
        own = slice(head * group, (head + 1) * group)
        lse2 = torch.stack(
            [attend(forward, _tensor(q[rows, h]), keys, values, places)[1] for h in range(own.start, own.stop)], 1
        )
        return attend_backward(
            points, _tensor(grad[rows, own]), _tensor(q[rows, own]), keys[first_key:end], values[first_key:end],
            _tensor(out[rows, own]), lse2, places - first_key,
        )  # fmt: skip

    width = length if length <= WHOLE else WINDOW
    rows = [*range(first, first + width), *([first + length - 1] if width < length else [])]
    tail = slice(first + length - width, first + length)
    expected = {}
    for head in heads:
        dq = [gradients(head, 0, width, 0)[0]]
        if width < length:
            dq.append(gradients(head, length - 1, length, 0)[0])
        _, dk, dv = gradients(head, length - width, length, length - width)
        for name, value in zip(ATTENTION_GRADIENTS, (torch.cat(dq), dk, dv), strict=True):
            expected[f"{name} of head {head}"] = value.numpy()

    def found(result: Sequence[Any]) -> Results:
        have = {}
        for head in heads:
            own = slice(head * group, (head + 1) * group)
            parts = (result[0][rows, own], result[1][tail, head], result[2][tail, head])
            for name, part in zip(ATTENTION_GRADIENTS, parts, strict=True):
                have[f"{name} of head {head}"] = np.ascontiguousarray(part)
        return have

    return Slices(rows, expected, found)


def _logits(region: Region, x: Array, temperature: float, host: Host) -> torch.Tensor:
    panels: Panels = host.weights.rows(region)
    parts = []
    for start in range(0, panels.rows, 1 << 14):  # a part of the head is unpacked at a time
        ids = np.arange(start, min(panels.rows, start + (1 << 14)))
        parts.append(plain.chains(np.ascontiguousarray(x), unpack_row(panels, ids), 1, host.workers))
    z = torch.from_numpy(np.concatenate(parts, axis=1))
    return div(z, torch.full_like(z, float(np.float32(temperature))))


def head_slice(
    contract: Contract, region: Region, x: Array, targets: NDArray[np.int64], temperature: float, host: Host
) -> Results:
    """Statistics of some rows."""
    points = contract.entries[(host.case, "logprob")]
    found = statistics(points, _logits(region, x, temperature, host), torch.from_numpy(targets.astype(np.int64)))
    return {name: np.ascontiguousarray(value) for name, value in vars(found).items()}


def head_backward_slice(
    contract: Contract,
    region: Region,
    x: Array,
    targets: NDArray[np.int64],
    temperature: float,
    coefficient: Array,
    host: Host,
) -> Results:
    """Gradient of the first features of some hidden rows."""
    z = _logits(region, x, temperature, host)
    ids = torch.from_numpy(targets.astype(np.int64))
    found = statistics(contract.entries[("trainer_forward", "logprob")], z, ids)
    points, dgrad = (contract.entries[("trainer_backward", name)] for name in ("logprob", "lm_head"))
    m, log_sum = (torch.from_numpy(v)[:, None].expand_as(z) for v in (found.max, found.log_sum))
    exp2 = primitive(points.primitive("exp2"))
    p = exp2(mul(sub(sub(z, m), log_sum), torch.full_like(z, LOG2E)))
    hot = torch.zeros_like(z)
    hot[torch.arange(len(z)), ids] = 1.0
    given = torch.from_numpy(np.ascontiguousarray(coefficient))
    c = div(given, torch.full_like(given, float(np.float32(temperature))))
    dz = mul(sub(hot, p), c[:, None].expand_as(z))
    if (to := points.rounds("output")) is not None:
        dz = cast(dz, to)
    shards = dgrad.split.leaves
    panels: Panels = host.weights.columns(region)
    weight = unpack_row(panels, np.arange(min(panels.rows, 8)))
    padding = -dz.shape[1] % (VOCABULARY_LEAF * shards) if shards > 1 else 0
    rows = np.pad(dz.numpy(), ((0, 0), (0, padding)))
    return {"gradient of hidden": _rounded(plain.chains(rows, weight, shards, host.workers), host)}
