"""Slot policies on a recorded routing trace: how often experts would have been there.

Runs the engine's own slot tables and policies (`spo_replay`) over the ids that routers picked, and
beside them two that no engine can have: a static choice, and one that knows the future. Reads no model
and keeps no time: what a miss costs is for the bench.
"""

from __future__ import annotations

import ctypes
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from speculoe_local.runtime import native
from speculoe_local.runtime.errors import ModelError, OptionError
from speculoe_local.runtime.options import EngineOptions

__all__ = [
    "HALF_LIFE",
    "POLICIES",
    "RESIDENCIES",
    "Pool",
    "Replay",
    "Row",
    "Trace",
    "default_pool",
    "deal",
    "load_trace",
    "replay",
]

Pool = Literal["layer", "shared"]

RESIDENCIES = (0.10, 0.25, 0.50, 0.75)
POLICIES = ("lru", "lfu-decay", "learned", "static", "clairvoyant")
WARM = 0.5
HALF_LIFE = 16  # tokens, as the engine has it

_NATIVE = {
    "lru": native.POLICY["lru"],
    "lfu-decay": native.POLICY["decayed"],
    "learned": native.POLICY["learned"],
    "clairvoyant": native.CLAIRVOYANT,
}
_LARGEST_BYTES = 2 << 30  # of ids, unpacked
_MOST_EXPERTS = 1 << 16
_MOST_LAYERS = 1 << 12


@dataclass(frozen=True, slots=True)
class Trace:
    """Which experts a model's routers picked.

    `ids`: int32 [tokens, layers, k], in a token's layer each expert once; -1 where none was recorded.
    """

    name: str
    ids: NDArray[np.int32]
    n_expert: int


@dataclass(frozen=True, slots=True)
class Row:
    """What one policy did at one residency. Both rates are over the counted tokens alone.

    `hit_rate`: share of the experts asked for that were resident before; `default`: this is what the
    engine does at that residency.
    """

    policy: str
    pool: Pool
    residency: float
    hit_rate: float
    uploads_per_token: float
    default: bool


@dataclass(frozen=True, slots=True)
class Replay:
    trace: str
    tokens: int
    warm: float
    rows: tuple[Row, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "trace": self.trace,
            "tokens": self.tokens,
            "warm": self.warm,
            "rows": [asdict(row) for row in self.rows],
        }


def load_trace(path: Path) -> Trace:
    """Read an .npz with `ids`, integers [tokens, layers, k], and `meta`, JSON text with `n_expert`.

    Other arrays are left alone. Raises ModelError when the file is not one or its ids are not experts.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            _check_members(path, archive)
        with np.load(path, allow_pickle=False) as arrays:
            raw, meta = arrays["ids"], arrays["meta"]
    except FileNotFoundError:
        raise ModelError(f"trace {str(path)!r} does not exist; give the path of an .npz") from None
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise _damaged(path, f"is not a readable .npz: {reason[:120]}") from error
    n_expert = _n_expert(path, meta)
    return Trace(path.name, _checked(path, raw, n_expert), n_expert)


def default_pool(trace: Trace, residency: float) -> Pool | None:
    """How the engine lays out that many slots (placement.plan); None: it refuses so few.

    A trace does not say which layers are equal in shape: here they all are.
    """
    return "shared" if _slots(trace, residency) >= trace.ids.shape[2] else None


def deal(slots: int, n_layers: int, pool: Pool) -> tuple[int, ...]:
    """`slots` as the sizes of pools: one, or one per layer and the first ones get what is left over."""
    if pool == "shared":
        return (slots,)
    each, more = divmod(slots, n_layers)
    return tuple(each + (layer < more) for layer in range(n_layers))


def replay(
    trace: Trace,
    *,
    residencies: Sequence[float] = RESIDENCIES,
    policies: Sequence[str] = POLICIES,
    warm: float = WARM,
    progress: Callable[[float], None] | None = None,
) -> Replay:
    """All policies at all residencies (0 to 1), with slots shared by all layers and per layer.

    No policy that brings experts when they are asked for hits more of the counted tokens than the
    clairvoyant one, which keeps what they will ask for soonest. The share `warm` of the tokens, 0 to
    below 1, warms the slots; the rest counts. Layouts that leave a layer without a slot have no row.
    Raises OptionError for an unknown policy, and for a residency outside (0, 1] or too small for one
    slot.
    """
    for policy in policies:
        if policy not in POLICIES:
            raise OptionError(
                f"--policy {policy[:40]!r} is not known; use one of {', '.join(POLICIES)}"
            )
    for residency in residencies:
        if not 0 < residency <= 1:
            raise OptionError(f"--residency {residency:g} is not above 0 and at most 1; use 0.25")
        if _slots(trace, residency) < 1:
            least = 1 / (trace.ids.shape[1] * trace.n_expert)
            raise OptionError(
                f"--residency {residency:g} gives no slot to {trace.name}; use at least {least:.2g}"
            )
    tokens, n_layers, _ = trace.ids.shape
    n_warm = int(tokens * warm)
    wanted = [
        (policy, pool, residency)
        for residency in residencies
        for pool in _pools()
        for policy in policies
        if min(deal(_slots(trace, residency), n_layers, pool)) > 0
    ]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    rows = []
    with ThreadPoolExecutor(min(cores or 1, 8)) as threads:
        for row in threads.map(lambda w: _row(trace, n_warm, *w), wanted):
            rows.append(row)
            if progress is not None:
                progress(len(rows) / len(wanted))
    return Replay(trace.name, tokens, warm, tuple(rows))


def _pools() -> tuple[Pool, ...]:
    return ("shared", "layer")


def _slots(trace: Trace, residency: float) -> int:
    # 0.29 x 100 experts are 29 slots, whatever binary fractions make of it.
    return int(residency * trace.ids.shape[1] * trace.n_expert + 1e-6)


def _row(trace: Trace, n_warm: int, policy: str, pool: Pool, residency: float) -> Row:
    tokens, n_layers, _ = trace.ids.shape
    pools = deal(_slots(trace, residency), n_layers, pool)
    run = _static if policy == "static" else _run_native
    requests, hits = run(trace, n_warm, policy, pools)
    return Row(
        policy=policy,
        pool=pool,
        residency=residency,
        hit_rate=hits / requests if requests else 0.0,
        uploads_per_token=(requests - hits) / (tokens - n_warm),
        default=pool == default_pool(trace, residency)
        and _NATIVE.get(policy) == native.POLICY[_engine_policy()],
    )


def _engine_policy() -> str:
    return str(next(f.default for f in fields(EngineOptions) if f.name == "policy"))


def _run_native(trace: Trace, n_warm: int, policy: str, pools: tuple[int, ...]) -> tuple[int, int]:
    """(experts asked for, of these resident) of the counted tokens."""
    tokens, n_layers, n_used = trace.ids.shape
    pool_of = [0] * n_layers if len(pools) == 1 else list(range(n_layers))
    params = native.ReplayParams(
        ids=trace.ids.ctypes.data,
        pool_of=(ctypes.c_int32 * n_layers)(*pool_of),
        pools=(ctypes.c_int32 * len(pools))(*pools),
        n_tokens=tokens,
        n_warm=n_warm,
        n_layers=n_layers,
        n_used=n_used,
        n_expert=trace.n_expert,
        n_pools=len(pools),
        policy=_NATIVE[policy],
        half_life=HALF_LIFE,
    )
    counts = native.ReplayCounts()
    error = ctypes.create_string_buffer(1024)
    status = native.functions.spo_replay(
        ctypes.byref(params), ctypes.byref(counts), error, len(error)
    )
    if status != native.Status.OK:
        raise ModelError(f"trace {trace.name!r}: {error.value.decode('utf-8', 'replace')}")
    return counts.requests, counts.hits


def _static(trace: Trace, n_warm: int, policy: str, pools: tuple[int, ...]) -> tuple[int, int]:
    """The most frequent experts of the warm tokens stay, and no other ever comes."""
    shape = (trace.ids.shape[1], trace.n_expert)
    warm, counted = _uses(trace.ids[:n_warm], shape), _uses(trace.ids[n_warm:], shape)
    hits = 0
    groups = zip(warm, counted, strict=True) if len(pools) > 1 else [(warm, counted)]
    for slots, (before, after) in zip(pools, groups, strict=True):
        kept = np.argsort(-before.ravel(), kind="stable")[:slots]
        hits += int(after.ravel()[kept].sum())
    return int(counted.sum()), hits


def _uses(ids: NDArray[np.int32], shape: tuple[int, int]) -> NDArray[np.int64]:
    """How often each expert of each layer was asked for, [layers, experts]."""
    counts = np.zeros(shape, np.int64)
    for layer in range(shape[0]):
        picked = ids[:, layer].ravel()
        counts[layer] = np.bincount(picked[picked >= 0], minlength=shape[1])
    return counts


def _check_members(path: Path, archive: zipfile.ZipFile) -> None:
    names = archive.namelist()
    for name in ("ids", "meta"):
        if f"{name}.npy" not in names:
            found = ", ".join(names[:8]) or "nothing"
            raise _damaged(path, f"has no array {name!r}, only {found[:80]}")
        # A small archive can unpack to more than there is memory.
        nbytes = archive.getinfo(f"{name}.npy").file_size
        if nbytes > _LARGEST_BYTES:
            raise _damaged(path, f"unpacks {nbytes} bytes of {name}, above {_LARGEST_BYTES}")


def _n_expert(path: Path, meta: NDArray[Any]) -> int:
    try:
        n_expert = json.loads(str(meta.item()))["n_expert"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise _damaged(path, "has no n_expert in its meta, a JSON object") from None
    if type(n_expert) is not int or not 1 <= n_expert <= _MOST_EXPERTS:
        raise _damaged(
            path, f"has n_expert {str(n_expert)[:40]}, not a number in 1..{_MOST_EXPERTS}"
        )
    return n_expert


def _checked(path: Path, raw: NDArray[Any], n_expert: int) -> NDArray[np.int32]:
    if raw.ndim != 3 or 0 in raw.shape:
        raise _damaged(path, f"has ids of shape {raw.shape}, not [tokens, layers, k]")
    if raw.dtype.kind not in "iu":
        raise _damaged(path, f"has ids of type {raw.dtype}, not integers")
    if raw.shape[1] > _MOST_LAYERS or raw.shape[2] > n_expert:
        raise _damaged(
            path,
            f"has {raw.shape[1]} layers and k = {raw.shape[2]}, above {_MOST_LAYERS} or n_expert {n_expert}",
        )
    least, most = int(raw.min()), int(raw.max())
    if least < -1 or most >= n_expert:
        wrong = least if least < -1 else most
        raise _damaged(path, f"has expert {wrong}, not in 0..{n_expert - 1} (-1: not recorded)")
    ids = np.array(raw, np.int32, order="C")
    for i in range(1, ids.shape[2]):
        again = (ids[:, :, :i] == ids[:, :, i : i + 1]).any(axis=2)
        ids[:, :, i][again] = -1
    return ids


def _damaged(path: Path, reason: str) -> ModelError:
    return ModelError(f"trace {str(path)!r} {reason}")
