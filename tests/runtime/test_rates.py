"""Rates are measured with ggml, remembered by machine and type, and never taken from a hole."""

from __future__ import annotations

import json

import pytest

from speculoe_local.runtime import rates
from speculoe_local.runtime.errors import ModelError

Q4_K = 12


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(rates, "cache_file", lambda: tmp_path / "cache" / "rates.json")
    monkeypatch.setattr(rates, "_LIMIT_S", 0.01)
    monkeypatch.setattr(rates, "_WEIGHTS_BYTES", 32 << 20)
    return tmp_path


def test_measured_rates_are_those_of_a_machine_and_are_measured_once(home, monkeypatch):
    first = rates.measured(Q4_K, None)
    monkeypatch.setattr(rates, "measure", lambda *_: pytest.fail("measured twice"))

    assert first == rates.measured(Q4_K, None)
    assert 1e8 < first.processor < 1e13
    assert 1e8 < first.memory < 1e13
    assert (None, None) == (first.device, first.upload)
    with pytest.raises(pytest.fail.Exception, match="measured twice"):
        rates.measured(Q4_K, None, again=True)
    with pytest.raises(pytest.fail.Exception, match="measured twice"):
        rates.measured(Q4_K + 1, None)


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"%s": 3}', '{"%s": {"old": 1}}'])
def test_a_damaged_memory_of_rates_is_measured_over(damage, home):
    key = rates._key("rates", Q4_K, "", "")
    rates.cache_file().parent.mkdir()
    rates.cache_file().write_text(damage.replace("%s", key))

    found = rates.measured(Q4_K, None)

    assert found.processor == json.loads(rates.cache_file().read_text())[key]["processor"]


def test_rates_are_measured_where_nothing_can_be_kept(home, monkeypatch):
    (home / "file").touch()
    monkeypatch.setattr(rates, "cache_file", lambda: home / "file" / "rates.json")

    assert rates.measured(Q4_K, None).processor > 0


def test_a_hole_says_nothing_about_a_disk(home):
    path = home / "hole.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF")
        file.truncate(1 << 30)

    with pytest.raises(ModelError, match=r"mostly a hole.*give --disk"):
        rates.disk(path)


def test_a_small_file_is_read_but_its_rate_is_not_kept(home):
    path = home / "model.gguf"
    path.write_bytes(bytes(range(256)) * 8192)

    assert rates.disk(path) > 0
    assert not rates.cache_file().exists()
