"""The table of routers says what the pinned llama.cpp does: read from its source, row by row."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from speculoe_local.runtime.routers import RULES, UNPREDICTABLE, Gating

# Helpers receive the normed input as an argument; those norms are held to real graphs elsewhere.
NORM_ELSEWHERE = {"gemma4", "lfm2moe", "nemotron_h", "nemotron_h_moe", "qwen35moe", "qwen3next"}
NORMS = {
    "ffn_norm": "ffn_norm.weight",
    "ffn_norm_exps": "ffn_norm_exps.weight",
    "attn_norm": "attn_norm.weight",
    "attn_post_norm": "post_attention_norm.weight",
}


@dataclass(frozen=True)
class Call:
    """One architecture's first call of build_moe_ffn, and what its hyperparameters are read from."""

    norm_weights: str
    scale: str
    gating: str
    norm: str
    norm_type: str
    hparams: str


def calls_of(source: Path) -> dict[str, Call]:
    """All architectures that route experts, by the name in a GGUF."""
    texts = {path: path.read_text() for path in sorted((source / "models").glob("*.cpp"))}
    names = dict(
        re.findall(r'\{ LLM_ARCH_(\w+),\s*"([^"]+)"', (source / "llama-arch.cpp").read_text())
    )
    classes = re.findall(
        r"case LLM_ARCH_(\w+):\s*return new (llama_model_\w+)\(",
        (source / "llama-model.cpp").read_text(),
    )
    header = (source / "models" / "models.h").read_text()
    bodies = re.findall(r"struct (llama_model_\w+) : public (\w+) \{(.*?)\n\};", header, re.DOTALL)
    parent = {name: base for name, base, _ in bodies}
    graph = {
        name: shared[1]
        for name, _, body in bodies
        if (shared := re.search(r"using graph = (\w+)::graph", body))
    }
    found = {}
    for arch, name in classes:
        built = graph.get(name, name)
        calling = [t for t in texts.values() if f"{built}::" in t and "build_moe_ffn(" in t]
        reading = [
            text
            for text in texts.values()
            for owner in (name, parent.get(name))
            if re.search(rf"void {owner}::load_arch_hparams", text)
        ]
        # A file of another class may only mention this one; the graph's own comes first.
        calling.sort(key=lambda text: f"{built}::graph" not in text or f"{built}::load" not in text)
        if calling:
            found[names[arch]] = _call(calling[0], reading[0])
    return found


def _call(text: str, hparams: str) -> Call:
    at = text.index("build_moe_ffn(")
    depth, end = 1, at + len("build_moe_ffn(")
    start = end
    while depth:
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        end += 1
    plain = re.sub(r"//[^\n]*|/\*.*?\*/", "", text[start : end - 1], flags=re.DOTALL)
    arguments = [argument.strip() for argument in plain.split(",")]
    kind = next(i for i, argument in enumerate(arguments) if argument.startswith("LLM_FFN_"))
    norms = re.findall(
        r"build_norm\(\s*\w+,\s*(?:model\.)?layer(?:s\[il\])?\.(\w+),[^;]*?(\w+), il\)", text[:at]
    )
    norm, norm_type = norms[-1] if norms else ("", "")
    weights, scale, gating = arguments[kind + 1 : kind + 4]
    return Call(weights, scale, gating, norm, norm_type, hparams)


@pytest.fixture(scope="module")
def calls(repository: Path) -> dict[str, Call]:
    return calls_of(repository / "build" / "native" / "llama.cpp" / "src")


def test_every_architecture_that_routes_has_a_row_and_no_other_does(calls: dict[str, Call]) -> None:
    assert not RULES.keys() & UNPREDICTABLE.keys()
    # One graph for many encoders; only this one of them has experts.
    encoders = {"bert", "jina-bert-v2", "jina-bert-v3", "nomic-bert", "nomic-bert-moe"}
    # Dense users of a graph that routes for another.
    dense = {"phi3", "lfm2"}
    assert (
        calls.keys() - encoders - dense | {"nomic-bert-moe"} == RULES.keys() | UNPREDICTABLE.keys()
    )


@pytest.mark.parametrize("name", RULES)
def test_a_row_says_what_the_graph_does(name: str, calls: dict[str, Call]) -> None:
    rule, call = RULES[name], calls[name]

    by_file = {"true": True, "false": False, "hparams.expert_weights_norm": None}
    assert by_file[call.norm_weights] is rule.norm_weights
    if rule.norm_weights is None:
        assert "LLM_KV_EXPERT_WEIGHTS_NORM" in call.hparams
    reads_scale = "LLM_KV_EXPERT_WEIGHTS_SCALE" in call.hparams
    assert (call.scale == "hparams.expert_weights_scale" and reads_scale) is rule.scaled
    fixed = re.fullmatch(r"LLAMA_EXPERT_GATING_FUNC_TYPE_(\w+)", call.gating)
    assert (Gating[fixed[1]] if fixed else None) is rule.gating
    if fixed is None:
        assert "LLM_KV_EXPERT_GATING_FUNC" in call.hparams
        given = re.findall(
            r"expert_gating_func = +LLAMA_EXPERT_GATING_FUNC_TYPE_(\w+)", call.hparams
        )
        assert (Gating[given[-1]] if given else None) is rule.default


@pytest.mark.parametrize("name", sorted(RULES.keys() - NORM_ELSEWHERE))
def test_a_row_names_the_norm_before_the_router(name: str, calls: dict[str, Call]) -> None:
    call = calls[name]

    assert RULES[name].norm == NORMS[call.norm]
    assert call.norm_type in ("LLM_NORM_RMS", "cohere2moe_norm_type")
