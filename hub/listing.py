"""Ask the hub what a repository holds: its files, their sizes and hashes, and the commit they are of.

Two requests: the tree, and the head of one file, which also tells whether we may have it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented there
    build_hf_headers,
    get_session,
    hf_raise_for_status,
)

import speculoe_local
from speculoe_local.hub.errors import NetworkError
from speculoe_local.hub.explain import explain, is_transient, wait_s
from speculoe_local.hub.names import ModelName

__all__ = ["Hub", "Listed", "Wanted"]

TIMEOUT_S: Final = 30.0
TRIES: Final = 4
LONGEST_WAIT_S: Final = 60.0  # a hub that asks for more is answered with its own message
_BLOB: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{7,127}")
_COMMIT: Final = re.compile(r"[0-9A-Za-z._-]{1,64}")
_PAGES: Final = 200  # of 1000 entries

T = TypeVar("T")
Wait = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Listed:
    """A file of a repository: `sha256` None where the hub's list does not say."""

    path: str
    nbytes: int
    sha256: str | None


@dataclass(frozen=True, slots=True)
class Wanted:
    """A file to fetch: `blob` is the name of its bytes in the cache, its hash; `url` names one commit.

    `xet` is what the hub's library needs to fetch it from xet storage, None where it is not there.
    """

    path: str
    nbytes: int
    blob: str
    url: str
    commit: str
    xet: Any = None


class Hub:
    """The hub at `endpoint`, for `name`. Every method raises HubError, one line."""

    def __init__(self, name: ModelName, endpoint: str | None, wait: Wait) -> None:
        self.name = name
        self.endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self.wait = wait

    def headers(self) -> dict[str, str]:
        """For every request, the token of this user among them."""
        found: dict[str, str] = build_hf_headers(
            library_name="speculoe-local", library_version=speculoe_local.__version__
        )
        return found

    def tree(self) -> tuple[Listed, ...]:
        """All files of the repository, at the revision asked for."""
        revision = (self.name.revision or "main").replace("/", "%2F")
        url = f"{self.endpoint}/api/models/{self.name.repo}/tree/{revision}?recursive=true"
        found: list[Listed] = []
        for _ in range(_PAGES):
            entries, following = self._patiently(lambda page=url: self._page(page))  # type: ignore[misc]
            found += [listed for entry in entries if (listed := _listed(entry)) is not None]
            if following is None:
                return tuple(found)
            url = following
        raise NetworkError(f"{self.name}: the hub's list of files does not end; check HF_ENDPOINT")

    def head(self, file: Listed, commit: str | None = None) -> Wanted:
        """`file` as the hub would send it now, or as it is in `commit`."""
        url = hf_hub_url(
            self.name.repo,
            file.path,
            revision=commit or self.name.revision or "main",
            endpoint=self.endpoint,
        )
        found = self._patiently(
            lambda: get_hf_file_metadata(
                url, timeout=TIMEOUT_S, headers=self.headers(), endpoint=self.endpoint
            )
        )
        blob = found.etag or ""
        there = found.commit_hash or ""
        if not (_COMMIT.fullmatch(there) and _BLOB.fullmatch(blob)) or found.size is None:
            raise NetworkError(
                f"{self.name}: {self.endpoint} does not answer as a hub does (commit, hash or size of "
                f"{file.path} is missing); check HF_ENDPOINT and proxies"
            )
        pinned = hf_hub_url(self.name.repo, file.path, revision=there, endpoint=self.endpoint)
        return Wanted(file.path, found.size, blob, pinned, there, found.xet_file_data)

    def wanted(self, file: Listed, commit: str) -> Wanted:
        """`file` in `commit`, without a request where the list has said its hash."""
        if file.sha256 is None or file.nbytes > constants.MAX_HTTP_DOWNLOAD_SIZE:
            return self.head(file, commit)
        url = hf_hub_url(self.name.repo, file.path, revision=commit, endpoint=self.endpoint)
        return Wanted(file.path, file.nbytes, file.sha256, url, commit)

    def _page(self, url: str) -> tuple[list[Any], str | None]:
        response = get_session().get(url, headers=self.headers(), timeout=TIMEOUT_S)
        hf_raise_for_status(response)
        try:
            entries = response.json()
        except ValueError:
            entries = None
        if not isinstance(entries, list):
            raise NetworkError(
                f"{self.name}: {self.endpoint} answers with something that is no list of files; check "
                "HF_ENDPOINT, and whether a proxy or a login page stands between"
            )
        following = response.links.get("next", {}).get("url")
        return entries, following if following and following.startswith(self.endpoint) else None

    def _patiently(self, request: Callable[[], T]) -> T:
        for failures in range(1, TRIES + 1):
            try:
                return request()
            except Exception as error:
                pause = wait_s(error, failures)
                if failures == TRIES or not is_transient(error) or pause > LONGEST_WAIT_S:
                    raise explain(error, self.name, self.endpoint) from error
                self.wait(pause)
        raise AssertionError("the last try returns or raises")


def _listed(entry: Any) -> Listed | None:
    """A file of the hub's list; None for folders, and for paths that would leave the snapshot."""
    if not isinstance(entry, dict) or entry.get("type") != "file":
        return None
    path, nbytes, lfs = entry.get("path"), entry.get("size"), entry.get("lfs")
    if not isinstance(path, str) or not isinstance(nbytes, int) or nbytes < 0:
        return None
    parts = path.split("/")
    if any(part in ("", ".", "..") or "\\" in part or ":" in part for part in parts):
        return None
    sha = lfs.get("oid") if isinstance(lfs, dict) else None
    known = isinstance(sha, str) and re.fullmatch(r"[0-9a-f]{64}", sha) is not None
    return Listed(path, nbytes, sha if known else None)
