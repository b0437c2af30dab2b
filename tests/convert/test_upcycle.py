"""The command line of upcycling, its texts, and what it says when it cannot start."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from speculoe_local.convert import prompts, texts, upcycle
from speculoe_local.convert.embedded import shipped_split
from speculoe_local.convert.gguf_raw import read_gguf
from speculoe_local.convert.selftext import chat_text, sample_ids
from speculoe_local.convert.split import pack_split, unpack_split
from speculoe_local.convert.tokens import token_windows
from speculoe_local.runtime.errors import OptionError
from tests.convert.test_split import random_split
from tests.models.tiny import build
from tests.models.vocab import CHAT_TEMPLATE


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("upcycle") / "dense.gguf")


def test_the_repack_command_writes_a_model(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    split, out = tmp_path / "split.npz", tmp_path / "moe.gguf"
    split.write_bytes(pack_split(random_split()))

    assert 0 == upcycle.main(["repack", str(dense), str(split), str(out)])
    assert f"{out.stat().st_size} bytes" in capsys.readouterr().out
    assert 4 == read_gguf(out).value("bailingmoe.expert_count")


def test_a_split_that_does_not_fit_ends_with_one_line_and_code_1(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    split = tmp_path / "split.npz"
    split.write_bytes(pack_split(random_split(layers=3)))

    assert 1 == upcycle.main(["repack", str(dense), str(split), str(tmp_path / "moe.gguf")])
    assert 1 == len(capsys.readouterr().err.splitlines())
    assert not (tmp_path / "moe.gguf").exists()


def test_analysis_without_torch_says_what_to_install(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)

    with pytest.raises(OptionError, match=r"pip install 'speculoe-local\[train\]'"):
        upcycle.analyse(dense, [texts.python_topics()], tmp_path / "split.npz")


def test_python_text_is_there_and_hashed() -> None:
    for source in (texts.python_topics(), texts.python_docstrings()):
        assert sum(map(len, source.documents)) > 100_000, source.name
        assert 64 == len(source.sha256)


def test_no_held_out_sentence_is_in_a_calibration_text() -> None:
    held_out = Path(__file__).with_name("heldout.txt").read_text(encoding="utf-8")
    sentences = [s.strip() for s in held_out.replace("\n", " ").split(". ") if len(s) > 40]
    sources = (texts.python_topics(), texts.python_docstrings())
    seen = " ".join(document for source in sources for document in source.documents)
    seen = " ".join([seen, *prompts.OPENINGS, *prompts.chat_prompts()]).replace("\n", " ")

    assert len(sentences) > 50
    assert [] == [sentence for sentence in sentences if sentence in seen]


def test_the_shipped_split_names_its_texts_and_their_licences() -> None:
    listed = json.loads(unpack_split(shipped_split()).provenance["texts"])

    assert {"name", "licence", "sha256"} == set().union(*listed)
    assert {"PSF-2.0", "Apache-2.0"} == {source["licence"] for source in listed}


def test_text_that_was_kept_is_not_written_again(dense: Path, tmp_path: Path) -> None:
    kept = tmp_path / "written.json"
    kept.write_text(json.dumps(["one", "two"]))

    assert ("one", "two") == texts.model_text(dense, kept).documents


def test_prompts_are_many_and_different() -> None:
    asked = prompts.chat_prompts()

    assert 300 < len(set(asked)) == len(asked)


def test_a_prompt_ends_where_the_answer_starts() -> None:
    expected = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"

    assert expected == chat_text(CHAT_TEMPLATE, "Why?")


def test_sampling_keeps_to_the_likeliest_and_to_the_seed() -> None:
    logits = np.random.default_rng(0).standard_normal((200, 40)).astype(np.float32)
    draws = [sample_ids(logits, np.random.default_rng(seed), 1.0, 5) for seed in (1, 1, 2)]

    assert (draws[0] == draws[1]).all()
    assert (draws[0] != draws[2]).any()
    best = np.argsort(logits, axis=1)[:, -5:]
    assert (best == draws[0][:, None]).any(axis=1).all()


def test_windows_are_cut_and_shuffled_by_the_seed(dense: Path) -> None:
    documents = ["the cat sat on the mat", "a hat is in the bag"] * 8
    first, again, other = (token_windows(dense, documents, seed=s, window=16) for s in (1, 1, 2))

    assert 16 == first.shape[1]
    assert (first == again).all()
    assert (first != other).any()
    assert sorted(map(tuple, first.tolist())) == sorted(map(tuple, other.tolist()))


def test_texts_that_fill_no_window_are_refused(dense: Path) -> None:
    with pytest.raises(OptionError, match="512 fill one window"):
        token_windows(dense, ["short"], seed=0)
