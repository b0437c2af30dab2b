"""A machine is what the user says, and for the rest what is here; nonsense is refused."""

from __future__ import annotations

import re

import pytest

from speculoe_local.runtime import machine, rates
from speculoe_local.runtime.devices import Device
from speculoe_local.runtime.errors import OptionError
from speculoe_local.runtime.host import host_of
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.rates import Measured

GIB = 1 << 30
CARD = {"vram": "12GiB", "vram_rate": "500GB/s", "link": "24GB/s,10us"}
REST = {"ram": "32GiB", "ram_rate": "60GB/s", "disk": "5GB/s"}
MEASURED = Measured(20e9, 10e9, 300e9, 12e9, True, "2025-01-31")


@pytest.fixture
def model(tiny_model):
    return ModelMap.read(tiny_model("gpt-oss"))


@pytest.fixture
def asked(monkeypatch):
    """Which types and devices were measured."""
    calls = []

    def measured(ggml_type, device, *, again):
        calls.append((ggml_type, device.name if device else None, again))
        return MEASURED

    monkeypatch.setattr(rates, "measured", measured)
    return calls


@pytest.fixture
def device(monkeypatch):
    found = Device("Vulkan0", "vulkan", 0, "a card", "gpu", 7 * GIB, 8 * GIB, True, True, True, 1)
    monkeypatch.setattr("speculoe_local.runtime.devices.choose", lambda _: found)
    return found


def test_a_machine_that_is_described_is_not_measured(model, asked):
    found = host_of(model, **CARD, **REST)

    assert [] == asked
    assert (30 * GIB, 12 * GIB, 12 * GIB) == (
        found.ram_bytes, found.card.total_bytes, found.card.free_bytes
    )  # fmt: skip
    assert (0.75 * 60e9, 5e9) == (found.products.bytes_per_s, found.disk.bytes_per_s)
    assert pytest.approx((0.7 * 500e9, 24e9)) == (
        found.card.products.bytes_per_s, found.card.link.bytes_per_s
    )  # fmt: skip
    assert pytest.approx(10e-6) == found.card.latency_s


def test_what_is_not_described_is_measured_with_the_models_own_type(model, asked, device):
    found = host_of(model, disk="5GB/s", again=True)

    assert [(39, "Vulkan0", True)] == asked  # MXFP4
    assert (10e9, 300e9, 12e9) == (
        found.products.bytes_per_s, found.card.products.bytes_per_s, found.card.link.bytes_per_s
    )  # fmt: skip
    assert (7 * GIB, 8 * GIB) == (found.card.free_bytes, found.card.total_bytes)
    assert 0 < found.ram_bytes <= machine.look().memory_bytes
    assert "pinned memory, measured here on 2025-01-31" == found.card.link.origin


def test_what_is_given_stands_above_what_is_measured(model, asked, device):
    found = host_of(model, vram="6GiB", link="3GB/s", disk="5GB/s", ram_rate="40GB/s")

    assert (6 * GIB, 3e9, 300e9, 30e9) == (
        found.card.total_bytes,
        found.card.link.bytes_per_s,
        found.card.products.bytes_per_s,
        found.products.bytes_per_s,
    )


def test_the_disk_is_that_of_the_model(model, asked):
    assert host_of(model, device="cpu").disk.bytes_per_s > 0


@pytest.mark.parametrize("given", [{"vram": "12GiB"}, {"link": "3GB/s"}, {"vram_rate": "1TB/s"}])
def test_a_device_that_is_neither_here_nor_described_is_refused(given, model, asked):
    with pytest.raises(OptionError, match=r"give --vram, --link and --vram-rate\b"):
        host_of(model, device="cpu", **given)


@pytest.mark.parametrize(
    ("option", "wrong"),
    [
        ("--ram", "-5GB"),
        ("--ram", "0"),
        ("--ram", "999999999999TB"),
        ("--vram", "25%"),
        ("--vram", "auto"),
        ("--vram", "much"),
        ("--vram", ""),
        ("--disk", "-1GB/s"),
        ("--disk", "0GB/s"),
        ("--disk", "3GB/s,1us"),
        ("--ram-rate", "50GB"),
        ("--ram-rate", "1.2.3GB/s"),
        ("--vram-rate", "9999TB/s"),
        ("--link", "1GB/s,soon"),
        ("--device", "abacus"),
    ],
)
def test_nonsense_is_refused_in_one_line_that_names_it(option, wrong, model, asked):
    given = {**REST} if option == "--device" else {**CARD, **REST}
    with pytest.raises(OptionError) as refused:
        host_of(model, **{**given, option.removeprefix("--").replace("-", "_"): wrong})

    assert re.fullmatch(rf"{option}\b[^\n]*{re.escape(wrong)}[^\n]*", str(refused.value))
