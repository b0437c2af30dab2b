"""Names of models: spellings, labels, shards, choice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculoe_local.hub.errors import NoSuchModelError
from speculoe_local.hub.names import ModelName, ModelSet, choose, label_of, parse_name, sets_of
from speculoe_local.runtime.errors import OptionError

REPO = "owner/Some-Model_1.5-GGUF"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (REPO, ModelName(REPO)),
        (f"{REPO}:q4_k_m", ModelName(REPO, quant="q4_k_m")),
        (f"{REPO}@v1:Q8_0", ModelName(REPO, quant="Q8_0", revision="v1")),
        (f"{REPO}@main", ModelName(REPO)),
        (f"{REPO}@refs/pr/3:Q8_0", ModelName(REPO, quant="Q8_0", revision="refs/pr/3")),
        (f"{REPO}:sub/a-Q2_K.gguf", ModelName(REPO, file="sub/a-Q2_K.gguf")),
        (f"hf:{REPO}", ModelName(REPO)),
        (f"hf://{REPO}@v1/sub/a.gguf", ModelName(REPO, file="sub/a.gguf", revision="v1")),
        (f"hf.co/{REPO}:IQ2_XS", ModelName(REPO, quant="IQ2_XS")),
        (f"HF.co/{REPO}", ModelName(REPO)),
        (f"huggingface.co/{REPO}", ModelName(REPO)),
        (f"https://huggingface.co/{REPO}/", ModelName(REPO)),
        (f"https://hf.co/{REPO}:Q8_0", ModelName(REPO, quant="Q8_0")),
        (
            f"https://huggingface.co/{REPO}/resolve/main/a%20b.gguf?download=true",
            ModelName(REPO, file="a b.gguf"),
        ),
        (
            f"https://huggingface.co/{REPO}/blob/v2/a.gguf",
            ModelName(REPO, file="a.gguf", revision="v2"),
        ),
        (
            f"https://huggingface.co/{REPO}/blob/refs/pr/7/a.gguf",
            ModelName(REPO, file="a.gguf", revision="refs/pr/7"),
        ),
        (f"https://huggingface.co/{REPO}/tree/main/Q4_K_M", ModelName(REPO, quant="Q4_K_M")),
    ],
)
def test_a_name_has_many_spellings(text, expected):
    assert expected == parse_name(text)


@pytest.mark.parametrize(
    "text",
    [
        "", "model", "./x", "/a/b", "../a/b", "a/../b", "a/b/../c.gguf", f"{REPO}:../x.gguf", f"{REPO}:",
        f"{REPO}@../x", "a--b/c", "a/b/README.md", f"{REPO}/a.gguf:Q8_0", "ftp://hf.co/a/b", "a/" + "b" * 96,
        "https://example.com/a/b", "https://huggingface.co/a", "https://[/a/b", "a/b:c:d", "ä/b", "a/b\n",
    ],
)  # fmt: skip
def test_what_is_no_name_is_refused_in_one_line(text):
    if text.strip() != text:
        assert ModelName("a/b") == parse_name(text)
        return
    with pytest.raises(OptionError) as refused:
        parse_name(text)

    assert 1 == len(str(refused.value).splitlines())


def test_an_address_on_the_endpoint_of_the_environment_is_a_name(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:8000/hf")

    expected = ModelName(REPO, file="a.gguf", revision="v1")
    assert expected == parse_name(f"http://127.0.0.1:8000/hf/{REPO}/resolve/v1/a.gguf")


@given(st.text(max_size=40))
def test_any_text_is_a_name_or_refused(text):
    try:
        name = parse_name(text)
    except OptionError:
        return
    assert ".." not in str(name)
    assert 1 == name.repo.count("/")


@given(
    st.from_regex(r"[a-z][a-z0-9]{0,8}/[A-Z][a-z0-9.]{0,8}[a-z]", fullmatch=True),
    st.sampled_from([None, "Q4_K_M", "iq2_xs", "BF16"]),
    st.sampled_from([None, "v1", "refs/pr/3", "a" * 40]),
)
def test_a_name_as_text_reads_back_as_itself(repo, quant, revision):
    name = ModelName(repo, quant=quant, revision=revision)

    assert name == parse_name(str(name))


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("a-Q4_K_M.gguf", "Q4_K_M"), ("a.q8_0.gguf", "Q8_0"), ("a-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"), ("IQ2_XXS/a-00001-of-00002.gguf", "IQ2_XXS"),
        ("a-Q6_K-00002-of-00002.gguf", "Q6_K"), ("a-BF16.gguf", "BF16"), ("tiny-v1.0.gguf", "tiny-v1.0"),
        ("a-Q4_K_M-imat.gguf", "Q4_K_M"), ("Q8_0/a-Q4_0.gguf", "Q4_0"),
    ],
)  # fmt: skip
def test_the_label_is_the_quantization_that_the_path_names(path, label):
    assert label == label_of(path)


def test_shards_are_one_model_and_what_is_missing_is_told():
    names = [f"a-Q8_0-{n:05d}-of-00003.gguf" for n in (1, 2, 3)]

    assert (ModelSet("Q8_0", tuple(names)),) == sets_of(reversed(names))
    assert (ModelSet("Q8_0", (names[0], names[2]), (names[1],)),) == sets_of(names[::2])


def test_files_that_are_no_model_of_their_own_are_left_out():
    side = ["mmproj-a-F16.gguf", "a-imatrix.gguf", "mtp-a-Q8_0.gguf", "eagle3-a.gguf", "README.md"]

    assert ["F16"] == [one.label for one in sets_of([*side, "a-F16.gguf", "a-F16.speculoe.gguf"])]


@pytest.mark.parametrize(
    ("there", "asked", "expected"),
    [
        (["a-Q2_K.gguf", "a-Q4_K_M.gguf", "a-Q8_0.gguf"], None, "a-Q4_K_M.gguf"),
        (["a-F16.gguf", "a-Q8_0.gguf"], None, "a-Q8_0.gguf"),
        (["b-F16.gguf", "a-IQ1_S.gguf"], None, "a-IQ1_S.gguf"),
        (["a-UD-Q4_K_M.gguf", "a-Q4_K_M.gguf"], "q4_k_m", "a-Q4_K_M.gguf"),
        (["a-IQ4_XS.gguf", "a-UD-Q4_K_XL.gguf"], "q4_k_xl", "a-UD-Q4_K_XL.gguf"),
        (["a-Q4_K_M.gguf", "a-Q4_K_S.gguf"], "Q4_K_S", "a-Q4_K_S.gguf"),
        (["sub/first.gguf", "sub/second.gguf"], "second", "sub/second.gguf"),
    ],
)
def test_the_choice_is_that_of_llama_cpp(there, asked, expected):
    chosen = choose(sets_of(there), ModelName(REPO, quant=asked))

    assert (expected,) == chosen.paths


def test_a_file_is_chosen_by_any_of_its_shards():
    names = tuple(f"a-Q8_0-{n:05d}-of-00002.gguf" for n in (1, 2))

    assert names == choose(sets_of(names), ModelName(REPO, file=names[1])).paths


@pytest.mark.parametrize("asked", ["Q5_K_M", "K_M", "Q4"])
def test_a_quant_that_is_not_there_lists_what_is(asked):
    with pytest.raises(NoSuchModelError, match=rf"has no {asked}: it has Q2_K, Q4_K_M$"):
        choose(sets_of(["a-Q2_K.gguf", "a-Q4_K_M.gguf"]), ModelName(REPO, quant=asked))


def test_a_repository_without_a_gguf_says_so():
    with pytest.raises(NoSuchModelError, match="has no GGUF model"):
        choose((), ModelName(REPO))
