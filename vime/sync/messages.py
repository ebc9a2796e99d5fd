"""What the coordinator of a weight sync and an engine say to each other, and the frames that it travels in.

A frame is JSON with a checksum: what was cut off or changed on the way is refused as a whole, and the sender's repeat
takes its place. No pickle is involved.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from rlkernel.contract.identity import TensorEntry
from vime.errors import VimeError


class FrameError(VimeError):
    """Bytes that are no frame: cut off, changed on the way, or of another version of vime."""


@dataclass(frozen=True)
class Message:
    """Part of the sync of ``version``; ``attempt`` numbers the syncs of a run, so that what comes late is known."""

    kind: ClassVar[str]
    version: int
    attempt: int


@dataclass(frozen=True)
class Stage(Message):
    """Take the weights behind a transport's handle beside the served ones."""

    kind = "stage"
    handle: Mapping[str, Any]


@dataclass(frozen=True)
class Commit(Message):
    """Serve what was staged, if its bytes still have this digest."""

    kind = "commit"
    digest: str


@dataclass(frozen=True)
class Rollback(Message):
    """Forget what was staged; serve on what is served."""

    kind = "rollback"


@dataclass(frozen=True)
class Staged(Message):
    """The weights lie beside the served ones; the manifest was computed from them."""

    kind = "staged"
    digest: str
    manifest: Sequence[TensorEntry]


@dataclass(frozen=True)
class Committed(Message):
    """The version is served; the digest is recomputed from the bytes that are."""

    kind = "committed"
    digest: str


@dataclass(frozen=True)
class RolledBack(Message):
    """Nothing of this attempt is staged, and nothing of it will be; ``served_digest`` is empty if nothing is served."""

    kind = "rolled_back"
    served_version: int | None
    served_digest: str


@dataclass(frozen=True)
class NothingStaged(Message):
    """Asked to commit, an engine has nothing of this attempt: it was started anew since it staged."""

    kind = "nothing_staged"


@dataclass(frozen=True)
class Refused(Message):
    """What was asked for was not done, and nothing of this attempt is staged. ``error``: the name of a class of
    :mod:`vime.errors`."""

    kind = "refused"
    call: str
    error: str
    reason: str


REQUESTS: tuple[type[Message], ...] = (Stage, Commit, Rollback)
REPLIES: tuple[type[Message], ...] = (Staged, Committed, RolledBack, NothingStaged, Refused)
_KINDS = {kind.kind: kind for kind in (*REQUESTS, *REPLIES)}


def _plain(message: Message) -> dict[str, Any]:
    data = {field.name: getattr(message, field.name) for field in fields(message)}
    if isinstance(message, Staged):
        data["manifest"] = [entry.as_json() for entry in message.manifest]
    return data


def encode(message: Message) -> bytes:
    """The frame of a message."""
    body = json.dumps({"kind": message.kind, **_plain(message)}, sort_keys=True).encode()
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def decode(frame: bytes) -> Message:
    """Inverse of :func:`encode`. Raises FrameError for anything that it cannot have made."""
    digest, separator, body = frame.partition(b"\n")
    if not separator or hashlib.sha256(body).hexdigest().encode() != digest:
        raise FrameError(f"a message of {len(frame)} bytes was cut off or changed on its way")
    try:
        data = json.loads(body)
        if not isinstance(data, dict) or not all(type(data.get(key)) is int for key in ("version", "attempt")):
            raise ValueError("it names no version and attempt")
        kind = _KINDS[data.pop("kind")]
        if set(data) != {field.name for field in fields(kind)}:
            raise KeyError(f"{kind.kind} has the fields {sorted(data)}")
        if kind is Staged:
            data["manifest"] = tuple(TensorEntry.from_json(entry) for entry in data["manifest"])
        return kind(**data)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise FrameError(f"a message of another version of vime: {error}") from error


def first_difference(published: Sequence[TensorEntry], found: Sequence[TensorEntry]) -> str:
    """In what two manifests differ first, as a sentence without its full stop; empty if in nothing."""
    ours, theirs = {e.name: e for e in published}, {e.name: e for e in found}
    for name in sorted(ours | theirs):
        if name not in theirs:
            return f"tensor {name} is missing"
        if name not in ours:
            return f"tensor {name} was never published"
        if ours[name] == theirs[name]:
            continue
        for field in ("shape", "dtype"):
            want, have = getattr(ours[name], field), getattr(theirs[name], field)
            if want != have:
                return f"tensor {name} has {field} {have}, published was {want}"
        return f"the bytes of tensor {name} are others"
    return ""
