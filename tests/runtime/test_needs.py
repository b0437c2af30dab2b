"""Memory is what llama.cpp itself allocates for the same model and context."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace

import pytest

from speculoe_local.runtime.errors import OptionError
from speculoe_local.runtime.llama import Context, Model, Shape
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.needs import needs_of, traffic_of
from tests.models.tiny import FAMILIES

_MIB = 1 << 20
_LINE = r"{} buffer size = +([0-9.]+) MiB"


@pytest.fixture
def opened(tiny_model, caplog):
    """What llama.cpp says it allocated, in MiB, for a family's tiny model and a context."""

    def start(family, n_ctx):
        caplog.set_level(logging.DEBUG, "speculoe_local.llama")
        model = Model(tiny_model(family), lazy_experts=False, repack=False)
        Context(model, Shape(n_ctx=n_ctx, n_batch=512, n_ubatch=512, n_threads=1)).close()
        model.close()
        said = {
            kind: sum(float(size) for size in re.findall(_LINE.format(kind), caplog.text))
            for kind in ("KV", "RS", "compute")
        }
        caplog.clear()
        return SimpleNamespace(**said)

    return start


@pytest.mark.parametrize("family", FAMILIES)
def test_kv_and_state_are_what_llama_cpp_allocates(family, tiny_model, opened):
    said = opened(family, 2000)
    needs = needs_of(ModelMap.read(tiny_model(family)), 2000)

    assert 2048 == needs.ctx
    assert pytest.approx(said.KV, abs=0.006) == needs.kv_bytes / _MIB
    assert pytest.approx(said.RS, abs=0.006) == needs.state_bytes / _MIB
    assert 0.8 * said.compute <= needs.compute_bytes / _MIB <= 1.6 * said.compute


def test_each_sequence_has_a_context_unless_they_share_it(tiny_model):
    model = ModelMap.read(tiny_model("qwen35moe"))
    one = needs_of(model, 2000)
    three = needs_of(model, 2000, sequences=3)
    shared = needs_of(model, 2000, sequences=3, shared=True)

    assert 0 < one.kv_bytes == shared.kv_bytes
    assert 0 < one.state_bytes
    assert (3 * one.kv_bytes, 3 * one.state_bytes) == (three.kv_bytes, three.state_bytes)
    assert 3 * one.state_bytes == shared.state_bytes  # a recurrent state is never shared
    assert one.compute_bytes == three.compute_bytes


def test_experts_may_take_what_weights_context_and_reserve_leave(tiny_model):
    needs = needs_of(ModelMap.read(tiny_model("qwen3moe")), 512)
    taken = needs.beside_bytes + needs.context_bytes

    assert 5 * _MIB == needs.room(7 * _MIB + taken, 2 * _MIB, on_device=True)
    beside = 5 * _MIB - needs.embedding_bytes
    assert beside == needs.room(7 * _MIB + taken, 2 * _MIB, on_device=False)
    assert needs.room(0, 0, on_device=True) < 0


def test_weights_are_counted_once_and_a_shared_output_twice_on_a_device(tiny_model):
    own = ModelMap.read(tiny_model("qwen3moe"))
    needs = needs_of(own, 512)
    embedding = own.tensors["token_embd.weight"].nbytes

    assert (False, embedding) == (needs.tied, needs.embedding_bytes)
    assert own.other_bytes == needs.weights_bytes == needs.beside_bytes + embedding


def test_a_token_reads_its_experts_and_no_other(tiny_model):
    model = ModelMap.read(tiny_model("qwen3moe"))
    traffic = traffic_of(model, needs_of(model, 512))

    assert model.routed_bytes * 2 // 8 == traffic.experts_bytes
    assert (4 * 2, 4 * 2 * 3) == (traffic.experts, traffic.copies)


def test_what_was_assumed_is_said(tiny_model):
    notes = {
        family: " ".join(needs_of(ModelMap.read(tiny_model(family)), 512).notes)
        for family in ("gpt-oss", "qwen35moe", "deepseek2", "qwen3moe")
    }

    assert "sliding window (32 tokens)" in notes["gpt-oss"]
    assert "3 of 4 layers are recurrent" in notes["qwen35moe"]
    assert "keys alone" in notes["deepseek2"]
    assert "" == notes["qwen3moe"]


@pytest.mark.parametrize("ctx", [0, -1, (1 << 24) + 1])
def test_a_context_that_is_none_is_refused(ctx, tiny_model):
    with pytest.raises(OptionError, match=r"^--ctx -?\d+ is not in 1\.\.16777216$"):
        needs_of(ModelMap.read(tiny_model("llama")), ctx)
