"""Names of models: what `owner/repo:QUANT` and its other spellings mean, and which files that is.

Pure functions over strings. Knows nothing of the network or the cache.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

from speculoe_local.hub.errors import NoSuchModelError
from speculoe_local.runtime.errors import OptionError

__all__ = ["ModelName", "ModelSet", "choose", "is_commit", "label_of", "parse_name", "sets_of"]

PREFERRED: Final = ("Q4_K_M", "Q8_0")  # what llama.cpp takes where the name says nothing

_HOSTS: Final = ("huggingface.co", "www.huggingface.co", "hf.co")
_PART: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_NAME: Final = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>refs/[\w-]+/[\w.-]+|[\w.-]+))?(?P<path>/[^:]*)?(?::(?P<tag>[^:]+))?",
    re.ASCII,
)
_SHARD: Final = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")
_QUANT: Final = re.compile(
    r"(?<![a-z0-9])((?:ud-)?(?:i?q[1-9](?:_[a-z0-9]+)*|tq[12]_0|[bf]?f(?:p)?(?:16|32)|mxfp4(?:_moe)?|nvfp4))"
    r"(?![a-z0-9])",
    re.IGNORECASE,
)
# Files beside a model that are no language model of their own: projectors, matrices of importance,
# draft heads, and our sidecars.
_SIDE: Final = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-", ".speculoe.gguf")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_LISTED: Final = 24
_REPO_LIMIT: Final = 96  # the hub's own


@dataclass(frozen=True, slots=True)
class ModelName:
    """`repo` is owner/name. At most one of `quant` (a tag, any case) and `file` (a path in the
    repository) is set; `revision` is a branch, tag or commit, None for the main branch."""

    repo: str
    quant: str | None = None
    file: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        tag = self.quant or self.file
        return f"{self.repo}{at}" + (f":{tag}" if tag else "")


@dataclass(frozen=True, slots=True)
class ModelSet:
    """The files of one model in a repository: `paths` in order of shards, `missing` the shards that
    its `count` promises and nobody has. `label` is its quant, or its file's name without one."""

    label: str
    paths: tuple[str, ...]
    missing: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        """The path without shard number and suffix."""
        shard = _SHARD.fullmatch(self.paths[0])
        return shard["stem"] if shard else self.paths[0].removesuffix(".gguf")


def parse_name(text: str) -> ModelName:
    """Read `owner/repo`, `owner/repo:QUANT`, `owner/repo:file.gguf`, each with `@REVISION` after the
    repository, with `hf:`, `hf://`, `hf.co/` or `huggingface.co/` before it; or an address of a
    repository, folder or file on the hub, as a browser shows it.

    Raises OptionError, naming the forms, for anything else.
    """
    asked = text.strip()
    scheme = asked.partition("://")[0].lower() if "://" in asked else ""
    if scheme in ("http", "https"):
        return _from_url(asked)
    rest = asked
    for prefix in ("hf://", "hf:", *(f"{host}/" for host in _HOSTS)):
        if rest.lower().startswith(prefix):
            rest = rest[len(prefix) :]
            break
    if rest != asked:
        rest = rest.strip("/").removeprefix("models/")
    return _from_text(asked, rest)


def is_commit(revision: str | None) -> bool:
    """Whether `revision` is a whole commit hash, which never moves."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def label_of(path: str) -> str:
    """What a file's path says its quantization is, upper case; its stem where it says nothing."""
    shard = _SHARD.fullmatch(path)
    stem = shard["stem"] if shard else path.removesuffix(".gguf")
    found = _QUANT.findall(stem)
    return str(found[-1]).upper() if found else stem.rpartition("/")[2]


def sets_of(paths: Iterable[str], *, side_files: bool = False) -> tuple[ModelSet, ...]:
    """The models among `paths`, in order of their names, shards of one model together.

    Files that are no `.gguf` are left out; so are side files, unless asked for.
    """
    groups: dict[tuple[str, int], dict[int, str]] = {}
    for path in sorted(set(paths)):
        if not path.endswith(".gguf"):
            continue
        if not side_files and any(mark in path.rpartition("/")[2] for mark in _SIDE):
            continue
        shard = _SHARD.fullmatch(path)
        if shard and 1 <= int(shard["number"]) <= int(shard["count"]):
            groups.setdefault((shard["stem"], int(shard["count"])), {})[int(shard["number"])] = path
        else:
            groups.setdefault((path, 0), {})[0] = path
    found = []
    for (stem, count), there in groups.items():
        absent = [
            f"{stem}-{number:05d}-of-{count:05d}.gguf"
            for number in range(1, count + 1)
            if number not in there
        ]
        paths = tuple(there[number] for number in sorted(there))
        found.append(ModelSet(label_of(paths[0]), paths, tuple(absent)))
    return tuple(found)


def choose(sets: Sequence[ModelSet], name: ModelName) -> ModelSet:
    """The one that `name` means: its file, else its quant (any case), else Q4_K_M, Q8_0 or the first.

    Raises NoSuchModelError, listing what there is.
    """
    if name.file is not None:
        for one in sets:
            if name.file in (*one.paths, *one.missing):
                return one
    elif name.quant is not None:
        if (found := _tagged(sets, name.quant)) is not None:
            return found
    else:
        for tag in PREFERRED:
            if (found := _tagged(sets, tag)) is not None:
                return found
        if sets:
            return sets[0]
    if not sets:
        raise NoSuchModelError(f"{name.repo} has no GGUF model: name a repository that has one")
    labels = list(dict.fromkeys(one.label for one in sets))
    shown = ", ".join(labels[:_LISTED]) + (", ..." if len(labels) > _LISTED else "")
    raise NoSuchModelError(f"{name.repo} has no {name.quant or name.file}: it has {shown}")


def _tagged(sets: Sequence[ModelSet], tag: str) -> ModelSet | None:
    wanted = tag.lower().removesuffix(".gguf")
    for one in sets:
        if one.label.lower() == wanted:
            return one
    for one in sets:
        if wanted in (one.stem.lower(), one.stem.lower().rpartition("/")[2]):
            return one
    # As llama.cpp: the tag anywhere in the path, but whole.
    pattern = re.compile(rf"(?<![a-z0-9_]){re.escape(wanted)}(?![a-z0-9_])")
    for one in sets:
        if pattern.search(one.stem.lower()):
            return one
    return None


def _from_url(asked: str) -> ModelName:
    try:
        url = urlsplit(asked)
        host, endpoint = url.hostname, urlsplit(os.environ.get("HF_ENDPOINT", ""))
    except ValueError as error:
        raise OptionError(f"{asked[:80]!r} is no address ({error}); use owner/repo:QUANT") from None
    if host not in (*_HOSTS, endpoint.hostname):
        raise OptionError(
            f"{asked[:80]!r} is not on {_HOSTS[0]}; download the file yourself and give its path, or "
            "set HF_ENDPOINT"
        )
    base = endpoint.path.rstrip("/") if host == endpoint.hostname else ""
    parts = [unquote(part) for part in url.path.removeprefix(base).strip("/").split("/")]
    if len(parts) < 4 or parts[2] not in ("tree", "blob", "resolve", "raw"):
        return _from_text(asked, "/".join(parts))
    # A revision has slashes in one case: refs/pr/N.
    end = 6 if parts[3] == "refs" and len(parts) > 5 else 4
    revision, inside = "/".join(parts[3:end]), "/".join(parts[end:])
    if inside and not inside.endswith(".gguf"):
        inside = label_of(inside)  # a folder that is named after its quant
    return _made(asked, f"{parts[0]}/{parts[1]}", revision, inside)


def _from_text(asked: str, rest: str) -> ModelName:
    match = _NAME.fullmatch(rest)
    if match is None:
        raise _no_name(asked)
    tag, path = match["tag"], (match["path"] or "").strip("/")
    if path and tag:
        raise OptionError(f"{asked[:80]!r} names a file and a quant: give one of them")
    if path and not path.endswith(".gguf"):
        raise OptionError(
            f"{asked[:80]!r} names {path[:80]!r}, which is no .gguf file: use owner/repo:QUANT"
        )
    return _made(asked, match["repo"], match["revision"], path or tag)


def _made(asked: str, repo: str, revision: str | None, tag: str | None) -> ModelName:
    if re.fullmatch(f"{_PART}/{_PART}", repo, re.ASCII) is None or len(repo) > _REPO_LIMIT:
        raise _no_name(asked)
    # What becomes part of a path must not leave its folder.
    inside = [*repo.split("/"), *(revision or "").split("/"), *(tag or "").split("/")]
    if "--" in repo or any(".." in part for part in inside):
        raise _no_name(asked)
    is_file = tag is not None and tag.endswith(".gguf")
    return ModelName(
        repo,
        quant=None if is_file else tag or None,
        file=tag if is_file else None,
        revision=None if revision == "main" else revision or None,
    )


def _no_name(asked: str) -> OptionError:
    return OptionError(
        f"{asked[:80]!r} is no name of a model: use owner/repo, owner/repo:QUANT or the address of a "
        "file on the hub"
    )
