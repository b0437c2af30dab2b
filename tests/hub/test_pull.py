"""Pulling from a hub that answers well, badly, late, in part, or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import huggingface_hub
import pytest

from speculoe_local.hub import download
from speculoe_local.hub import pull as pulling
from speculoe_local.hub.cache import PARTIAL, models
from speculoe_local.hub.errors import (
    AccessError,
    DamagedError,
    HubError,
    NetworkError,
    NoSuchModelError,
    OfflineError,
    SpaceError,
)
from speculoe_local.runtime.modelmap import ModelMap
from tests.hub.conftest import REPO
from tests.hub.fake_hub import COMMIT, Failure

Q8 = "tiny-Q8_0.gguf"


def partials(cache):
    return sorted(cache.rglob("*" + PARTIAL))


def blobs(cache):
    return sorted(path.name for path in cache.rglob("blobs/*"))


def test_a_model_without_quant_is_q4_k_m_with_all_its_shards(pulled, hub, cache, shards):
    done = pulled()

    assert f"{REPO}:Q4_K_M" == done.model.name
    assert list(shards) == [file.path for file in done.model.files]
    assert list(shards.values()) == [file.place.read_bytes() for file in done.model.files]
    assert sum(map(len, shards.values())) == done.fetched_bytes == done.model.nbytes
    assert 8 == ModelMap.read(done.model.path).n_expert
    assert COMMIT == (cache / "models--owner--Tiny-GGUF/refs/main").read_text()


def test_pulling_again_fetches_nothing(pulled, hub):
    pulled(f"{REPO}:q8_0")
    before = len(hub.downloads())
    again = pulled(f"hf.co/{REPO}:Q8_0")

    assert (0, True, before) == (again.fetched_bytes, again.model.complete, len(hub.downloads()))


def test_the_tools_of_the_hub_find_what_we_pulled_and_we_what_they_pulled(
    pulled, hub, cache, whole
):
    ours = pulled(f"{REPO}:Q8_0").model
    theirs = huggingface_hub.hf_hub_download(
        REPO, "Q4_K_M/tiny-Q4_K_M-00001-of-00003.gguf", cache_dir=cache, endpoint=hub.url
    )
    scanned = huggingface_hub.scan_cache_dir(cache)

    assert str(ours.path) == huggingface_hub.try_to_load_from_cache(REPO, Q8, cache_dir=cache)
    assert ([], [REPO]) == (scanned.warnings, [repo.repo_id for repo in scanned.repos])
    split = next(model for model in models(cache) if model.label == "Q4_K_M")
    assert (theirs, False) == (str(split.path), split.complete)
    assert 2 == len(pulled().model.files) - len(split.files)


def test_a_cut_connection_goes_on_behind_the_bytes_that_came(pulled, hub, waits, whole):
    hub.fail("GET", Q8, Failure(cut=100_000, times=2))
    done = pulled(f"{REPO}:Q8_0")

    starts = [request.range for request in hub.downloads()]
    assert ["", "bytes=100000-", "bytes=200000-"] == starts
    assert (len(whole), len(whole)) == (hub.sent[Q8], done.fetched_bytes)
    assert [1.0, 1.0] == waits


def test_a_hub_that_ignores_ranges_sends_it_all_again(pulled, hub, whole):
    hub.fail("GET", Q8, Failure(cut=100_000))
    hub.fail("GET", Q8, Failure(ignore_range=True))

    assert whole == pulled(f"{REPO}:Q8_0").model.path.read_bytes()


def test_a_range_that_is_not_the_one_asked_for_is_not_appended(pulled, hub, whole):
    hub.fail("GET", Q8, Failure(cut=100_000))
    hub.fail("GET", Q8, Failure(range_shift=7))

    assert whole == pulled(f"{REPO}:Q8_0").model.path.read_bytes()
    assert "bytes=100000-" == hub.downloads()[-1].range


@pytest.mark.parametrize("kept", [1.0, 1.5])
def test_a_partial_file_that_is_full_or_too_long_is_verified_or_begun_again(
    pulled, hub, cache, whole, kept
):
    partial = cache / f"models--owner--Tiny-GGUF/blobs/{hashlib.sha256(whole).hexdigest()}{PARTIAL}"
    partial.parent.mkdir(parents=True)
    partial.write_bytes((whole * 2)[: int(len(whole) * kept)])
    done = pulled(f"{REPO}:Q8_0")

    assert whole == done.model.path.read_bytes()
    assert (0 if kept == 1 else len(whole)) == done.fetched_bytes
    assert [] == partials(cache)


def test_a_range_that_cannot_be_satisfied_begins_again(pulled, hub, whole):
    hub.fail("GET", Q8, Failure(cut=100_000))
    hub.fail("GET", Q8, Failure(status=416, headers={"Content-Range": "bytes */5"}))

    assert whole == pulled(f"{REPO}:Q8_0").model.path.read_bytes()
    assert ["", "bytes=100000-", ""] == [request.range for request in hub.downloads()]


def test_bytes_of_another_download_in_the_partial_file_are_found_and_fetched_again(
    pulled, hub, cache, whole
):
    partial = cache / f"models--owner--Tiny-GGUF/blobs/{hashlib.sha256(whole).hexdigest()}{PARTIAL}"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"\xff" * 1000)

    assert whole == pulled(f"{REPO}:Q8_0").model.path.read_bytes()
    assert ["bytes=1000-", ""] == [request.range for request in hub.downloads()]


def test_a_file_with_another_hash_never_counts(pulled, hub, cache):
    hub.wrong_hash.add(Q8)
    with pytest.raises(DamagedError, match=r"SHA-256 .* the hub says") as refused:
        pulled(f"{REPO}:Q8_0")

    assert 1 == len(str(refused.value).splitlines())
    assert ([], []) == (blobs(cache), list(cache.rglob("*.gguf")))
    assert [False] == [model.complete for model in models(cache)]


def test_a_file_that_is_no_gguf_never_counts(pulled, hub, cache):
    hub.add(REPO, {Q8: b"<html>Please log in</html>" * 100})
    with pytest.raises(DamagedError, match="is no usable GGUF"):
        pulled()

    assert ([], []) == (blobs(cache), list(cache.rglob("*.gguf")))


def test_a_gguf_that_ends_early_in_the_repository_itself_never_counts(pulled, hub, cache, whole):
    hub.add(REPO, {Q8: whole[:-1000]})
    with pytest.raises(DamagedError, match="is truncated"):
        pulled()

    assert [] == list(cache.rglob("*.gguf"))


def test_the_page_of_a_proxy_instead_of_a_file_is_refused_before_it_is_written(pulled, hub, cache):
    hub.fail("GET", Q8, Failure(body=b"<html>blocked</html>", times=99))
    with pytest.raises(NetworkError, match=r"20 bytes came .* proxy"):
        pulled(f"{REPO}:Q8_0")

    assert [0] == [path.stat().st_size for path in partials(cache)]


@pytest.mark.parametrize(
    ("failure", "kind", "said"),
    [
        (Failure(404, {"X-Error-Code": "RepoNotFound"}), AccessError, "private or misspelt"),
        (Failure(401, {"X-Error-Code": "RepoNotFound"}), AccessError, "HF_TOKEN"),
        (Failure(401), AccessError, "refuses the token"),
        (Failure(403, {"X-Error-Code": "GatedRepo"}), AccessError, "accept its terms at http"),
        (Failure(403), AccessError, "forbids it"),
        (Failure(404, {"X-Error-Code": "EntryNotFound"}), NoSuchModelError, "does not have it"),
        (Failure(404), NoSuchModelError, "not found"),
        (Failure(429, {"Retry-After": "3600"}), NetworkError, "wait 3600 s"),
        (Failure(429, {"RateLimit": '"api";r=0;t=120'}), NetworkError, "wait 120 s"),
        (Failure(503), NetworkError, "answers 503"),
        (Failure(416), NetworkError, "answers 416"),
    ],
)
@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/tree/"), ("HEAD", Q8), ("GET", "/resolve/")]
)
def test_each_error_of_the_hub_is_one_line_with_a_next_step(
    pulled, hub, failure, kind, said, method, path
):
    hub.fail(method, path, Failure(failure.status, failure.headers, times=99))
    with pytest.raises(kind, match=said) as refused:
        pulled(f"{REPO}:Q8_0")

    assert 1 == len(str(refused.value).splitlines())


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/tree/"), ("HEAD", Q8), ("GET", "/resolve/")]
)
def test_a_hub_that_is_busy_is_asked_again_after_what_it_says(pulled, hub, waits, method, path):
    hub.fail(method, path, Failure(429, {"Retry-After": "7"}))
    hub.fail(method, path, Failure(503))

    assert pulled(f"{REPO}:Q8_0").model.complete
    assert [7.0, 2.0] == waits


def test_a_revision_that_is_not_there_is_named(pulled):
    with pytest.raises(NoSuchModelError, match="has no revision 'v9'"):
        pulled(f"{REPO}@v9:Q8_0")


def test_a_revision_is_pulled_as_itself(pulled, cache):
    done = pulled(f"{REPO}@v1:Q8_0")

    assert f"{REPO}@v1:Q8_0" == done.model.name
    assert COMMIT == (cache / "models--owner--Tiny-GGUF/refs/v1").read_text()


def test_a_quant_that_is_not_there_lists_what_is(pulled):
    with pytest.raises(NoSuchModelError, match=r"has no Q5_K_M: it has Q4_K_M, Q8_0$"):
        pulled(f"{REPO}:Q5_K_M")


def test_a_repository_that_lacks_a_shard_is_refused(pulled, hub, shards):
    hub.add(REPO, dict(list(shards.items())[1:]))
    with pytest.raises(NoSuchModelError, match=r"lacks Q4_K_M/tiny-Q4_K_M-00001-of-00003\.gguf"):
        pulled()


def test_an_answer_that_is_no_list_of_files_is_told_from_one(pulled, hub):
    hub.fail("GET", "/tree/", Failure(body=b"<html>Sign in to the hotel</html>"))
    with pytest.raises(NetworkError, match="no list of files"):
        pulled()


def test_paths_that_would_leave_the_cache_are_no_files(pulled, hub, whole):
    hub.add(REPO, {"../../evil-Q4_K_M.gguf": whole, "/etc/evil.gguf": whole, Q8: whole})

    assert f"{REPO}:Q8_0" == pulled().model.name


def test_a_hub_that_is_not_there_is_one_line(pulled, waits):
    with pytest.raises(NetworkError, match=r"cannot reach http://127.0.0.1:9 .* check the network"):
        pulled(endpoint="http://127.0.0.1:9")

    assert [1.0, 2.0, 4.0] == waits


def test_the_token_of_the_environment_is_sent(pulled, hub, monkeypatch):
    hub.token = "hf_secret"
    with pytest.raises(AccessError) as refused:
        pulled(f"{REPO}:Q8_0")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")

    assert pulled(f"{REPO}:Q8_0").model.complete
    assert "hf_secret" not in str(refused.value)


def test_a_model_is_refused_before_anything_is_fetched_when_the_disk_is_too_small(
    pulled, hub, monkeypatch, cache, whole
):
    monkeypatch.setattr(pulling, "free_bytes", lambda folder: 1 << 20)
    needed = len(whole) + pulling.MARGIN_BYTES
    with pytest.raises(SpaceError, match=rf"\({needed} bytes\) are needed, .* \({1 << 20} bytes\)"):
        pulled(f"{REPO}:Q8_0")

    assert ([], []) == (hub.downloads(), list(cache.rglob("blobs/*")))


def test_what_is_there_already_needs_no_space(pulled, hub, monkeypatch, shards):
    hub.fail("GET", "00003-of", Failure(cut=100_000))
    hub.fail("GET", "00003-of", Failure(status=403, times=1))
    with pytest.raises(AccessError):
        pulled()
    rest = len(list(shards.values())[2]) - 100_000
    monkeypatch.setattr(pulling, "free_bytes", lambda folder: rest + pulling.MARGIN_BYTES)

    assert rest == pulled().fetched_bytes


@pytest.fixture
def small_disk(tmp_path, monkeypatch):
    """A folder on a disk of 1 MiB, and what fills it: a real one where this user may mount one,
    otherwise writes that fail as on a full one."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode == 0:
        filler = folder / "filler"

        def fill():
            with filler.open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    return

        yield folder, fill, lambda: filler.unlink()
        subprocess.run(["umount", "-l", folder], check=True)
        return
    full = []
    write = download._write

    def failing(file, piece):
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, piece)

    monkeypatch.setattr(download, "_write", failing)
    yield folder, lambda: full.append(1), full.clear


def test_a_disk_that_fills_up_while_fetching_is_told_and_the_bytes_are_kept(
    pulled, hub, monkeypatch, small_disk, whole
):
    folder, fill, empty = small_disk
    monkeypatch.setattr(pulling, "MARGIN_BYTES", 0)

    filled = []

    def fill_at_a_third(progress):
        if progress.done_bytes > len(whole) // 3 and not filled:
            filled.append(progress)
            fill()

    with pytest.raises(SpaceError, match=r"are needed, .* are free") as refused:
        pulled(f"{REPO}:Q8_0", cache=folder, progress=fill_at_a_third)
    kept = sum(path.stat().st_size for path in partials(folder))
    empty()
    done = pulled(f"{REPO}:Q8_0", cache=folder)

    assert 1 == len(str(refused.value).splitlines())
    assert len(whole) // 3 < kept < len(whole)
    assert len(whole) - kept == done.fetched_bytes
    assert f"bytes={kept}-" == hub.downloads()[-1].range


def test_a_file_that_the_file_system_takes_no_further_is_told(hub, cache, whole):
    limit = 256 << 10
    code = (
        "import resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        "from speculoe_local.cli import main\n"
        f"sys.argv = ['speculoe-local', 'pull', '{REPO}:Q8_0']\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_ENDPOINT": hub.url},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (1, 1) == (done.returncode, len(done.stderr.splitlines()))
    assert "takes no file of this size" in done.stderr
    assert [limit] == [path.stat().st_size for path in partials(cache)]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_cache_that_cannot_be_written_is_told(pulled, monkeypatch, number):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(HubError, match=r"cannot be written .* set HF_HUB_CACHE"):
        pulled(f"{REPO}:Q8_0")


def test_a_hash_that_the_list_does_not_tell_comes_from_the_head_and_is_checked(pulled, hub, shards):
    hub.plain |= set(shards)  # small files: git's hashes
    done = pulled()

    assert 3 == len(hub.asked("HEAD"))
    assert {40} == {len(file.blob.name) for file in done.model.files}


def test_a_branch_that_moves_between_list_and_head_is_read_again(pulled, hub, whole, monkeypatch):
    real = pulling.Hub.tree
    seen = []

    def tree(self):
        found = real(self)
        if not seen:
            seen.append(1)
            hub.add(REPO, {Q8: whole + bytes(32)}, commit="d" * 40)
        return found

    monkeypatch.setattr(pulling.Hub, "tree", tree)

    assert "d" * 40 == pulled(f"{REPO}:Q8_0").model.commit


def test_a_new_commit_takes_the_old_one_s_bytes_and_calibration(pulled, hub, cache, whole):
    first = pulled(f"{REPO}:Q8_0").model
    sidecar = first.path.with_name("tiny-Q8_0.speculoe.gguf")
    sidecar.write_bytes(b"calibrated")
    hub.add(REPO, {Q8: whole, "README.md": b"new"}, commit="d" * 40)
    second = pulled(f"{REPO}:Q8_0")

    assert (0, "d" * 40) == (second.fetched_bytes, second.model.commit)
    assert b"calibrated" == second.model.path.with_name(sidecar.name).read_bytes()


def test_without_links_the_file_itself_lies_in_the_snapshot(pulled, cache, whole, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_SYMLINKS", True)
    model = pulled(f"{REPO}:Q8_0").model

    assert (False, whole, []) == (model.path.is_symlink(), model.path.read_bytes(), blobs(cache))
    assert 0 == pulled(f"{REPO}:Q8_0").fetched_bytes


def test_xet_storage_is_used_where_speed_is_asked_for_and_its_bytes_are_checked_too(
    pulled, hub, cache, whole, monkeypatch
):
    given = []

    def xet_get(*, incomplete_path, xet_file_data, headers, expected_size, **more):
        given.append(xet_file_data.file_hash)
        bar = more["tqdm_class"](total=expected_size, desc="")
        incomplete_path.write_bytes(whole if len(given) > 1 else bytes(expected_size))
        bar.update(expected_size)
        bar.close()

    monkeypatch.setattr(huggingface_hub.file_download, "xet_get", xet_get)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_XET_HIGH_PERFORMANCE", True)
    xet = {"X-Xet-Hash": "ab" * 32, "X-Xet-Refresh-Route": f"{hub.url}/token"}
    hub.fail("HEAD", Q8, Failure(headers=xet, times=2))
    seen = []
    with pytest.raises(DamagedError, match="SHA-256"):
        pulled(f"{REPO}:Q8_0", progress=seen.append)
    done = pulled(f"{REPO}:Q8_0", progress=seen.append)

    assert ["ab" * 32] * 2 == given
    assert ([], whole) == (hub.downloads(), done.model.path.read_bytes())
    assert len(whole) in [step.done_bytes for step in seen if step.phase == "downloading"]


def test_offline_what_is_complete_is_found_and_the_rest_refused_without_a_connection(
    pulled, hub, monkeypatch
):
    pulled(f"{REPO}:Q8_0")
    before = hub.connections
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    assert (0, True) == ((done := pulled(f"{REPO}:Q8_0")).fetched_bytes, done.model.complete)
    with pytest.raises(OfflineError, match="offline nothing can be fetched"):
        pulled(f"{REPO}:Q4_K_M")
    assert before == hub.connections


def test_progress_grows_to_the_whole_and_names_each_file(pulled, shards):
    seen = []
    pulled(progress=seen.append)
    fetched = [step.done_bytes for step in seen if step.phase == "downloading"]

    assert sorted(fetched) == fetched
    assert sum(map(len, shards.values())) == fetched[-1]
    assert [1, 2, 3] == sorted({step.number for step in seen if step.phase == "verifying"})
    assert list(shards) == list(dict.fromkeys(step.file for step in seen if step.file))


def test_a_hub_that_dribbles_is_waited_for(pulled, hub, waits, whole):
    hub.fail("GET", Q8, Failure(delay_s=0.01, chunk=50_000))

    assert len(whole) == pulled(f"{REPO}:Q8_0").fetched_bytes
    assert [] == waits


def test_a_hub_that_falls_silent_is_asked_again_for_the_rest(
    pulled, hub, waits, whole, monkeypatch
):
    monkeypatch.setattr(download, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0)
    silence = threading.Event()
    hub.fail("GET", Q8, Failure(gate=silence, chunk=100_000))
    done = pulled(f"{REPO}:Q8_0")
    silence.set()

    assert (len(whole), whole) == (done.fetched_bytes, done.model.path.read_bytes())
    assert ["", "bytes=100000-"] == [request.range for request in hub.downloads()]


def test_a_hub_that_hangs_up_each_time_is_given_up_on_and_what_came_is_kept(
    pulled, hub, waits, cache
):
    hub.fail("GET", Q8, Failure(cut=100_000))
    hub.fail("GET", Q8, Failure(cut=0, times=99))
    with pytest.raises(NetworkError, match="what was fetched is kept"):
        pulled(f"{REPO}:Q8_0")

    assert [100_000] == [path.stat().st_size for path in partials(cache)]
    assert [1.0, 2.0, 4.0, 8.0] == waits
