"""Prefixes on disk: private, bounded, checked, and found again."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

from speculoe_local.server.batching.diskcache import DiskCache, Stored


def cache(folder: Path, key: str = "model", nbytes: int = 1 << 20) -> DiskCache:
    return DiskCache(folder, key, max_bytes=nbytes, min_tokens=8)


def state(value: int, n: int = 100) -> np.ndarray:
    return np.full(n, value, np.uint8)


def fetched(disk: DiskCache, prompt: list[int], beyond: int = 0) -> Stored | None:
    there = threading.Event()
    stored = disk.fetch(prompt, beyond=beyond, then=there.set)
    assert stored is None or there.wait(10)
    return stored


def test_what_was_put_is_found_by_another_server(tmp_path: Path) -> None:
    tokens = list(range(20))
    first = cache(tmp_path)
    first.put(tokens, state(7))
    first.close()

    second = cache(tmp_path)
    found = fetched(second, [*tokens, 99])
    second.close()

    assert found is not None and found.done
    assert tuple(tokens) == found.tokens
    assert found.state is not None and np.array_equal(state(7), found.state)


def test_only_what_is_worth_it_is_fetched(tmp_path: Path) -> None:
    disk = cache(tmp_path)
    disk.put(list(range(20)), state(1))
    disk.close()
    again = cache(tmp_path)

    assert fetched(again, [*range(20), 5], beyond=21) is None
    assert fetched(again, [*range(5), 77, 78, 79]) is None
    assert fetched(again, [9, 9, 9]) is None
    again.close()


def test_a_prefix_of_what_is_stored_is_not_wanted(tmp_path: Path) -> None:
    disk = cache(tmp_path)
    disk.put(list(range(20)), state(1))

    assert not disk.wants(range(20))
    assert not disk.wants(range(12))
    assert not disk.wants(range(7))
    assert disk.wants(range(21))
    disk.close()


def test_what_a_lost_device_held_is_not_stored(tmp_path: Path) -> None:
    disk = cache(tmp_path)
    disk.put(list(range(20)), state(1, 0))
    disk.close()

    assert [] == list(tmp_path.iterdir())


def test_another_model_finds_nothing(tmp_path: Path) -> None:
    disk = cache(tmp_path, "one")
    disk.put(list(range(20)), state(1))
    disk.close()
    other = cache(tmp_path, "two")

    assert fetched(other, list(range(20))) is None
    other.close()


def test_a_damaged_file_is_dropped(tmp_path: Path) -> None:
    disk = cache(tmp_path)
    disk.put(list(range(20)), state(1))
    disk.close()
    (path,) = tmp_path.iterdir()
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)

    again = cache(tmp_path)
    found = fetched(again, list(range(20)))
    again.close()

    assert found is not None and found.state is None
    assert [] == list(tmp_path.iterdir())


def test_files_cut_short_or_of_no_sense_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.prefix").write_bytes(b"")
    (tmp_path / "b.prefix").write_bytes(b"\xff\xfe not json\n")
    (tmp_path / "c.prefix").write_bytes(b'{"format": 1, "key": "model", "tokens": "many"}\n')
    (tmp_path / "d.prefix").write_bytes(
        b'{"format": 1, "key": "model", "tokens": 9, "state": 1, "sha256": ""}\n123'
    )
    disk = cache(tmp_path)

    assert fetched(disk, list(range(20))) is None
    disk.close()


def test_the_folder_stays_within_its_bound_and_the_oldest_go(tmp_path: Path) -> None:
    disk = cache(tmp_path, nbytes=20_000)
    for i in range(12):
        disk.put([i] * 10, state(i, 4000))
    disk.close()

    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert 0 < sum(sizes) <= 20_000
    again = cache(tmp_path, nbytes=20_000)
    assert fetched(again, [11] * 10) is not None
    assert fetched(again, [0] * 10) is None
    again.close()


def test_files_are_for_the_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "cache"
    disk = cache(folder)
    disk.put(list(range(20)), state(1))
    disk.close()

    assert 0o700 == folder.stat().st_mode & 0o777
    assert {0o600} == {path.stat().st_mode & 0o777 for path in folder.iterdir()}


def test_a_folder_that_is_full_or_gone_costs_no_answer(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    disk = cache(folder)
    folder.rmdir()
    disk.put(list(range(20)), state(1))
    disk.close()

    assert disk.wants(range(20))
