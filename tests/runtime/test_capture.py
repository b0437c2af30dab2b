"""A capture shows what the graph computed, for the layers asked for, and raises what its taker raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from speculoe_local.runtime.capture import Capture, LayerRecord
from speculoe_local.runtime.errors import BackendError
from speculoe_local.runtime.gating import Gate, load_gates
from speculoe_local.runtime.llama import Context, Model, Shape
from speculoe_local.runtime.modelmap import ModelMap
from tests.models import probe, tiny
from tests.models.fixtures import TinyModel
from tests.runtime import router_models
from tests.runtime.routed import record

TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps in the sun."
SHARED = {"qwen35moe", "deepseek2", "deepseek2-fused", "bailingmoe", "llama4", "qwen2moe"}


@contextmanager
def loaded(path: Path) -> Iterator[Model]:
    with closing(Model(path, lazy_experts=False, repack=False)) as model:
        yield model


def captured(
    path: Path, blocks: list[int], outputs: list[int], text: str = TEXT
) -> list[LayerRecord]:
    records: list[LayerRecord] = []
    with loaded(path) as model:
        tokens = model.vocab.tokenize(text, add_bos=False)
        capture = Capture(blocks, records.append, outputs=outputs)
        shape = Shape(512, len(tokens), len(tokens), 1)
        with closing(Context(model, shape, watch=capture)) as context:
            capture.run(context, tokens)
    return records


def moe_blocks(path: Path) -> list[int]:
    return [layer.index for layer in ModelMap.read(path).layers]


@pytest.mark.parametrize("name", [*tiny.MOE_FAMILIES, "qwen2moe", "grovemoe"])
def test_records_are_what_the_graph_routed(
    name: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    known = name in router_models.VARIANTS
    path = router_models.build(name, tmp_path) if known else tiny_model(name)
    with probe.loaded(path) as model:
        truth = record(model, probe.tokenize(model, TEXT))
    gates = load_gates(ModelMap.read(path))
    blocks = moe_blocks(path)

    records = captured(path, blocks, blocks)

    assert blocks == [found.block for found in records]
    for found in records:
        gate, true = gates[found.block], truth[found.block]
        assert isinstance(gate, Gate)
        assert true.r is not None
        assert found.residual is not None
        np.testing.assert_array_equal(true.r, found.residual)
        np.testing.assert_array_equal(true.order[:, : gate.n_used], found.ids)
        np.testing.assert_array_equal(true.weights, found.weights)
        np.testing.assert_allclose(true.x @ gate.router.T, found.logits, atol=2e-3)
        assert found.outputs is not None
        assert (*found.ids.shape, gate.n_embd) == found.outputs.shape
        assert (name in SHARED) == (found.shared is not None)


@pytest.mark.parametrize("name", ["qwen3moe", "bailingmoe", "qwen35moe", "deepseek2", "gpt-oss"])
def test_residual_outputs_and_shared_make_the_next_residual_but_for_attention(
    name: str, tiny_model: TinyModel
) -> None:
    # Attention of the first position reads that position alone, so it depends on what comes in:
    # with its output matrix zeroed the next residual is the sum, for every position.
    path = tiny_model(name)
    without = without_attention(path)
    blocks = moe_blocks(without)

    first, second = captured(without, blocks, blocks)[:2]

    assert first.residual is not None
    assert first.outputs is not None
    assert second.residual is not None
    total = first.residual + (first.weights[:, :, None] * first.outputs).sum(axis=1)
    if first.shared is not None:
        total = total + first.shared
    np.testing.assert_allclose(second.residual, total, rtol=1e-4, atol=1e-4)


def without_attention(path: Path) -> Path:
    """A copy of the model whose attention adds nothing to the residual."""
    copy = path.with_name(f"{path.stem}-quiet.gguf")
    raw = bytearray(path.read_bytes())
    for name, tensor in ModelMap.read(path).tensors.items():
        if name.endswith(
            ("attn_output.weight", "attn_output.bias", "ssm_out.weight", "attn_o.weight")
        ):
            raw[tensor.offset : tensor.offset + tensor.nbytes] = bytes(tensor.nbytes)
    copy.write_bytes(raw)
    return copy


def test_only_the_layers_and_outputs_asked_for_are_given(tiny_model: TinyModel) -> None:
    records = captured(tiny_model("qwen3moe"), [1, 2], [2])

    assert [(1, False), (2, True)] == [(r.block, r.outputs is not None) for r in records]


def test_one_token_has_the_same_record_as_the_first_of_many(tiny_model: TinyModel) -> None:
    path = tiny_model("bailingmoe")
    many = captured(path, [0], [0], "aaaa bbbb")[0]

    one = captured(path, [0], [0], "a")[0]

    assert 1 == len(one.ids)
    assert one.outputs is not None
    assert (1, one.ids.shape[1], 64) == one.outputs.shape
    assert many.logits.shape[1:] == one.logits.shape[1:]


def test_a_capture_can_run_again_on_the_same_context(tiny_model: TinyModel) -> None:
    records: list[LayerRecord] = []
    with loaded(tiny_model("qwen35moe")) as model:  # recurrent: state must not leak between texts
        tokens = model.vocab.tokenize(TEXT, add_bos=False)
        capture = Capture([1], records.append, outputs=[1])
        with closing(Context(model, Shape(512, 512, 512, 1), watch=capture)) as context:
            capture.run(context, tokens)
            capture.run(context, tokens[::-1])
            capture.run(context, tokens)

    np.testing.assert_array_equal(records[0].logits, records[2].logits)
    assert not np.array_equal(records[0].logits, records[1].logits)


@pytest.mark.parametrize("error", [ValueError("taker"), KeyboardInterrupt()])
def test_what_the_taker_raises_is_raised_and_the_capture_still_works(
    error: BaseException, tiny_model: TinyModel, capfd: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []

    def take(found: LayerRecord) -> None:
        calls.append(found.block)
        if len(calls) == 2:
            raise error

    with loaded(tiny_model("qwen3moe")) as model:
        capture = Capture([0, 1, 2, 3], take)
        with closing(Context(model, Shape(64, 64, 64, 1), watch=capture)) as context:
            with pytest.raises(type(error)):
                capture.run(context, [1, 2, 3])
            assert [0, 1] == calls
            capture.run(context, [1, 2, 3])

    assert [0, 1, 0, 1, 2, 3] == calls
    assert ("", "") == capfd.readouterr()


def test_tokens_that_llama_cpp_refuses_are_one_line(tiny_model: TinyModel) -> None:
    with loaded(tiny_model("qwen3moe")) as model:
        capture = Capture([0], lambda found: None)
        shape = Shape(n_ctx=256, n_batch=64, n_ubatch=64, n_threads=1)
        with (
            closing(Context(model, shape, watch=capture)) as context,
            pytest.raises(BackendError, match="llama_decode of 3 tokens returned") as raised,
        ):
            capture.run(context, [1, 2, 1 << 30])

    assert "\n" not in str(raised.value)
