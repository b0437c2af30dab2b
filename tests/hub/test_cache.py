"""What lies in the cache: listed, verified, removed, and kept while it is open."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from speculoe_local.hub import inuse
from speculoe_local.hub.cache import cache_dir, find, models, ready
from speculoe_local.hub.download import blob_lock
from speculoe_local.hub.errors import AccessError, IncompleteError, InUseError, NotPulledError
from speculoe_local.hub.names import parse_name
from speculoe_local.hub.remove import remove
from speculoe_local.hub.resolve import resolve
from speculoe_local.hub.verify import verify
from speculoe_local.runtime.errors import ModelError, OptionError
from tests.hub.conftest import REPO, VARIABLES
from tests.hub.fake_hub import Failure

FOLDER = "models--owner--Tiny-GGUF"


def left(cache):
    return sorted(path.name for path in cache.rglob("blobs/*"))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"LLAMA_CACHE": "/a", "HF_HUB_CACHE": "/b"}, "/a"),
        ({"HF_HUB_CACHE": "/b", "HF_HOME": "/c"}, "/b"),
        ({"HUGGINGFACE_HUB_CACHE": "/b2", "HF_HOME": "/c"}, "/b2"),
        ({"HF_HOME": "$ROOM/c", "ROOM": "/r", "XDG_CACHE_HOME": "/d"}, "/r/c/hub"),
        ({"XDG_CACHE_HOME": "/d"}, "/d/huggingface/hub"),
        ({"HF_HUB_CACHE": "~/x", "HOME": "/home/é 中"}, "/home/é 中/x"),
        ({"HOME": "/home/user"}, "/home/user/.cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_llama_cpp_and_the_hub_s_tools_have_it(monkeypatch, variables, expected):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)

    assert Path(expected) == cache_dir()


def test_an_empty_cache_and_one_that_is_not_there_have_no_models(tmp_path):
    assert () == models(tmp_path) == models(tmp_path / "nowhere")


def test_a_model_is_found_by_quant_file_case_and_nothing(pulled, cache, shards):
    model = pulled().model
    shard = list(shards)[1]

    for text in (REPO, f"{REPO}:q4_k_m", f"{REPO}:{shard}", f"hf:{REPO}@{'c' * 12}:Q4_K_M"):
        assert model.files == ready(parse_name(text), cache).files


def test_a_name_without_quant_means_what_is_there_before_what_would_be_preferred(pulled, cache):
    pulled(f"{REPO}:Q8_0")

    assert "Q8_0" == ready(parse_name(REPO), cache).label
    with pytest.raises(NotPulledError, match=r"of owner/Tiny-GGUF it has Q8_0: run .* pull"):
        ready(parse_name(f"{REPO}:Q4_K_M"), cache)


@pytest.mark.parametrize("how", ["gone", "empty", "dangling"])
def test_a_set_that_lacks_a_shard_is_incomplete_and_says_how_to_go_on(pulled, cache, shards, how):
    place = pulled().model.files[1].place
    blob = place.resolve()
    place.unlink()
    if how == "empty":
        place.touch()
    elif how == "dangling":
        place.symlink_to(blob)
        blob.unlink()
    model = find(parse_name(REPO), cache)

    assert (False, [list(shards)[1]], None) == (
        model.complete,
        list(model.missing),
        model.total_bytes,
    )
    with pytest.raises(IncompleteError, match=r"2 of 3 files .* `speculoe-local pull owner/Tiny"):
        resolve(REPO, cache)
    assert pulled().model.complete


def test_a_path_is_itself_and_what_is_neither_path_nor_name_says_so(tmp_path, cache):
    there = tmp_path / "owner"
    there.mkdir()

    assert there == resolve(str(there), cache)
    for text in ("models/mistyped.gguf", "./x", "word"):
        with pytest.raises(ModelError, match="give the path of a GGUF file or a pulled name"):
            resolve(text, cache)
    with pytest.raises(OptionError, match=r"is not on huggingface\.co"):
        resolve("https://example.com/a/b", cache)
    with pytest.raises(NotPulledError, match=r"run `speculoe-local pull a/b`"):
        resolve("a/b", cache)


def test_two_models_of_one_quant_are_told_apart_by_their_files(pulled, hub, cache, whole):
    hub.add(REPO, {"a-Q8_0.gguf": whole, "b-Q8_0.gguf": whole})
    pulled(f"{REPO}:a-Q8_0.gguf")
    pulled(f"{REPO}:b-Q8_0.gguf")
    names = [model.name for model in models(cache)]

    assert [f"{REPO}:a-Q8_0.gguf", f"{REPO}:b-Q8_0.gguf"] == names
    assert names == [find(parse_name(name), cache).name for name in names]


def test_removing_frees_what_nothing_else_needs(pulled, hub, cache, whole, shards):
    hub.add(REPO, {"a-Q8_0.gguf": whole, "b-Q8_0.gguf": whole, **shards})
    pulled(f"{REPO}:a-Q8_0.gguf")
    pulled(f"{REPO}:b-Q8_0.gguf")
    pulled(f"{REPO}:Q4_K_M")
    first = remove(parse_name(f"{REPO}:a-Q8_0.gguf"), cache)
    kept = find(parse_name(f"{REPO}:Q8_0"), cache).path.read_bytes()
    second = remove(parse_name(f"{REPO}:b-Q8_0.gguf"), cache)
    third = remove(parse_name(REPO), cache)

    assert [0, len(whole), sum(map(len, shards.values()))] == [
        one.freed_bytes for (one,) in (first, second, third)
    ]
    assert whole == kept
    assert not (cache / FOLDER).exists()


def test_removing_takes_old_commits_and_the_sidecar_with_it(pulled, hub, cache, whole):
    old = pulled(f"{REPO}:Q8_0").model
    old.path.with_name("tiny-Q8_0.speculoe.gguf").write_bytes(b"12345")
    hub.add(REPO, {"tiny-Q8_0.gguf": whole[:-32] + bytes(32)}, commit="d" * 40)
    pulled(f"{REPO}:Q8_0")
    (removed,) = remove(parse_name(f"{REPO}:Q8_0"), cache)

    assert 2 * len(whole) + 5 == removed.freed_bytes
    assert not (cache / FOLDER).exists()


def test_files_of_the_repository_that_are_no_model_stay(pulled, cache):
    model = pulled(f"{REPO}:Q8_0").model
    other = model.path.with_name("config.json")
    other.write_text("{}")
    remove(parse_name(REPO), cache)

    assert (True, []) == (other.exists(), left(cache))


def test_a_model_that_is_not_there_cannot_be_removed(cache):
    for text in (REPO, f"{REPO}:Q8_0"):
        with pytest.raises(NotPulledError):
            remove(parse_name(text), cache)


def test_an_open_model_is_not_removed_until_it_is_closed(pulled, cache, whole):
    model = pulled(f"{REPO}:Q8_0").model
    with (
        inuse.opened(model, cache),
        inuse.opened(model, cache),
        pytest.raises(InUseError, match=f"open in process {os.getpid()}"),
    ):
        remove(parse_name(f"{REPO}:Q8_0"), cache)

    assert whole == model.path.read_bytes()
    assert len(whole) == remove(parse_name(REPO), cache)[0].freed_bytes


def test_a_killed_process_has_nothing_open(pulled, cache):
    pulled(f"{REPO}:Q8_0")
    code = (
        "import sys\n"
        "from speculoe_local.cli.options import resolve_model\n"
        f"print(resolve_model('{REPO}:Q8_0'), flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline().strip().endswith("tiny-Q8_0.gguf")
        with pytest.raises(InUseError, match=f"open in process {process.pid}"):
            remove(parse_name(f"{REPO}:Q8_0"), cache)
        process.kill()

    assert 1 == len(remove(parse_name(f"{REPO}:Q8_0"), cache))
    assert [] == list(cache.rglob("*.open"))


def test_a_model_that_is_being_pulled_is_not_removed(pulled, cache):
    model = pulled(f"{REPO}:Q8_0").model
    with (
        blob_lock(inuse.lock_folder(cache, REPO), model.files[0].blob.name),
        pytest.raises(InUseError, match="is being pulled"),
    ):
        remove(parse_name(REPO), cache)

    assert model.path.exists()


def test_using_a_model_is_remembered_though_the_disk_notes_no_access(pulled, cache):
    model = pulled(f"{REPO}:Q8_0").model
    os.utime(model.path, (1000, 2000))
    assert 1000 == find(parse_name(REPO), cache).last_used
    with inuse.opened(model, cache):
        used = find(parse_name(REPO), cache).last_used

    assert 1_000_000_000 < used
    assert 2000 == model.path.stat().st_mtime


def test_verify_finds_one_wrong_byte_and_a_cut_and_a_good_file(pulled, cache):
    split = pulled().model
    assert ["", "", ""] == [file.problem for file in verify(split)]
    with split.files[0].blob.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    os.truncate(split.files[1].blob, 1000)
    seen = []
    problems = [file.problem for file in verify(split, seen.append)]

    assert ["SHA-256" in problem for problem in problems] == [True, True, False]
    assert "" == problems[2]
    assert sum(file.place.stat().st_size for file in split.files) == sum(seen)


def test_verify_finds_shards_of_different_models(pulled, hub, cache, shards, whole):
    first, second, third = shards
    hub.add(REPO, {first: shards[first], second: shards[second], third: whole})
    problems = [file.problem for file in verify(pulled().model)]

    assert "its name says 3 of 3" in problems[0]
    assert ["", ""] == problems[1:]


def test_an_unfinished_pull_of_a_revision_is_listed_with_it(pulled, hub, cache):
    hub.fail("GET", "00002-of", Failure(status=403))
    with pytest.raises(AccessError):
        pulled(f"{REPO}@v1")
    (model,) = models(cache)

    assert (f"{REPO}@v1:Q4_K_M", False) == (model.name, model.complete)
    assert pulled(model.name).model.complete
    assert [f"{REPO}:Q4_K_M"] == [model.name for model in models(cache)]


def test_a_file_without_a_known_hash_is_checked_by_its_header(pulled, cache, whole):
    model = pulled(f"{REPO}:Q8_0").model
    model.path.unlink()
    model.path.write_bytes(whole)
    (good,) = verify(find(parse_name(REPO), cache))
    model.path.write_bytes(whole[:-100])
    (cut,) = verify(find(parse_name(REPO), cache))

    assert ("", False) == (good.problem, good.checked)
    assert "truncated" in cut.problem


def test_notes_of_pulls_that_are_no_notes_do_no_harm(pulled, cache):
    model = pulled(f"{REPO}:Q8_0").model
    for number, text in enumerate(("", "{}", "[]", '{"files": {"a": 1}}', '{"files": 1}', "\0")):
        (cache / FOLDER / f".speculoe-pull-{number}.json").write_text(text)

    assert (model.name,) == tuple(found.name for found in models(cache))
