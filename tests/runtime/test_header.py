"""The GGUF header reader: what it finds, what it refuses, and what a damaged file may cost."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speculoe_local.runtime.errors import ModelError
from speculoe_local.runtime.header import Array, Header, read_header, shown, type_name

U32, U64, STRING, ARRAY = 4, 10, 8, 9
F32, Q8_0, Q2_0 = 0, 8, 42
TOKENS = ["a", "", "naïve", "x" * 300]


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name.encode()) + struct.pack("<I", kind) + value


def tensor(
    name: bytes = b"t", shape: tuple[int, ...] = (8,), kind: int = F32, offset: int = 0
) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def pack(keys: list[bytes] = [], tensors: list[bytes] = [], version: int = 3) -> bytes:  # noqa: B006
    """A GGUF with room behind its header for small tensors."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    return head + b"".join(keys) + b"".join(tensors) + bytes(4096)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("headers")


@pytest.fixture(scope="module")
def sample(folder: Path) -> Path:
    """A small valid file from the format's own writer, with a value of every kind."""
    path = folder / "sample.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int64("i64", -5)
    writer.add_float32("f32", 0.5)
    writer.add_bool("flag", True)
    writer.add_string("text", "two\nlines")
    writer.add_array("tokens", TOKENS)
    writer.add_array("counts", [3, 1, 2])
    writer.add_tensor("first", np.arange(6, dtype=np.float32).reshape(2, 3))
    packed = np.arange(2 * 34, dtype=np.uint8).reshape(2, 34)
    writer.add_tensor("second", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refusal(path: Path, content: bytes) -> str:
    """The one-line reason why `content` is refused."""
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        read_header(path)
    reason = str(caught.value)
    assert len(reason.splitlines()) == 1
    assert reason.startswith(str(path))
    return reason


def test_metadata_of_every_kind_comes_back(sample: Path) -> None:
    metadata = read_header(sample).metadata

    assert (200, -5, 0.5) == (metadata["u8"], metadata["i64"], metadata["f32"])
    assert metadata["flag"] is True
    assert "two\nlines" == metadata["text"]
    tokens, counts = metadata["tokens"], metadata["counts"]
    assert isinstance(tokens, Array)
    assert isinstance(counts, Array)
    assert TOKENS == tokens.strings()
    assert [3, 1, 2] == counts.numbers().tolist()
    assert (4, 3) == (len(tokens), len(counts))


def test_an_array_asked_for_as_the_wrong_kind_is_refused(sample: Path) -> None:
    metadata = read_header(sample).metadata
    tokens, counts = metadata["tokens"], metadata["counts"]
    assert isinstance(tokens, Array)
    assert isinstance(counts, Array)

    with pytest.raises(ModelError, match="strings where numbers"):
        tokens.numbers()
    with pytest.raises(ModelError, match="numbers where strings"):
        counts.strings()


def test_tensors_lie_where_the_writers_own_reader_finds_them(sample: Path) -> None:
    header = read_header(sample)
    expected = gguf.GGUFReader(sample).tensors

    assert [(str(t.name), int(t.data_offset), int(t.n_bytes)) for t in expected] == [
        (t.name, t.offset, t.nbytes) for t in header.tensors
    ]
    assert [(3, 2), (32, 2)] == [t.shape for t in header.tensors]
    assert [F32, Q8_0] == [t.ggml_type for t in header.tensors]
    first = header.tensors[0]
    raw = sample.read_bytes()[first.offset : first.offset + first.nbytes]
    assert list(range(6)) == np.frombuffer(raw, np.float32).tolist()


def test_a_type_that_only_the_pinned_ggml_knows_has_its_size(folder: Path) -> None:
    path = folder / "q2_0.gguf"
    path.write_bytes(pack(tensors=[tensor(shape=(128, 2), kind=Q2_0)]))

    assert 2 * 2 * 18 == read_header(path).tensors[0].nbytes
    assert ["Q2_0", "Q8_0", "type 99"] == [type_name(kind) for kind in (Q2_0, Q8_0, 99)]


def test_a_name_that_is_not_text_can_be_read_and_shown(sample: Path, folder: Path) -> None:
    name = os.fsencode(folder) + b"/\xff\xfe\n.gguf"
    Path(os.fsdecode(name)).write_bytes(sample.read_bytes())

    header = read_header(name)

    assert 2 == len(header.tensors)
    assert shown(header.path).encode("ascii").endswith(b"/\\udcff\\udcfe\\n.gguf")


def test_what_is_no_readable_file_is_refused_in_its_own_words(folder: Path) -> None:
    missing, pipe, empty = folder / "none.gguf", folder / "pipe", folder / "empty.gguf"
    os.mkfifo(pipe)
    empty.touch()

    for words, place in [
        ("is a directory", folder),
        ("does not exist", missing),
        ("not a regular file", pipe),
        ("is empty", empty),
        ("cannot be read", Path("a\0b")),
    ]:
        with pytest.raises(ModelError, match=words):
            read_header(place)


def test_a_file_without_permission_is_refused(
    sample: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", deny)  # the suite may run as root, whom no mode stops

    with pytest.raises(ModelError, match="may not be read; check its permissions"):
        read_header(sample)


ABSURD = (1 << 63) + 1
ALIGNMENT = "general.alignment"
DAMAGE = {
    "magic": (b"PK\3\4" + bytes(60), r"starts with b'PK\x03\x04'"),
    "short magic": (b"GG", "starts with b'GG'"),
    "no version": (b"GGUF", "is truncated: the version ends at byte 8, the file has 4"),
    "version 0": (pack(version=0), "version 0"),
    "version 1": (pack(version=1), "version 1"),
    "version 4": (pack(version=4), "version 4"),
    "big-endian": (pack(version=3 << 24), "big-endian"),
    "tensor count": (b"GGUF" + struct.pack("<IQQ", 3, ABSURD, 0), f"claims {ABSURD} tensors"),
    "key count": (b"GGUF" + struct.pack("<IQQ", 3, 0, ABSURD), f"claims {ABSURD} keys"),
    "likely count": (b"GGUF" + struct.pack("<IQQ", 3, 900, 0), "smallest form of its 900 tensors"),
    "key length": (pack([struct.pack("<Q", ABSURD) + bytes(20)]), f"has {ABSURD} bytes"),
    "key not UTF-8": (pack([text(b"\xff\xfe")]), "not UTF-8"),
    "empty key": (pack([key("", U32, bytes(4))]), "key 0 is empty"),
    "double key": (pack([key("a", U32, bytes(4))] * 2), "'a' is there twice"),
    "value type": (pack([key("a", 13, bytes(4))]), "value type 13"),
    "string length": (pack([key("a", STRING, struct.pack("<Q", ABSURD))]), "key 'a' has"),
    "nested array": (pack([key("a", ARRAY, struct.pack("<IQ", ARRAY, 1))]), "array of value type"),
    "array count": (pack([key("a", ARRAY, struct.pack("<IQ", U64, ABSURD))]), f"{ABSURD} elements"),
    "likely array": (pack([key("a", ARRAY, struct.pack("<IQ", U64, 9000))]), "is truncated"),
    "string in array": (
        pack([key("a", ARRAY, struct.pack("<IQQ", STRING, 2, ABSURD))]),
        "a string in key 'a'",
    ),
    "alignment type": (pack([key(ALIGNMENT, U64, struct.pack("<Q", 32))]), "value type 10"),
    "alignment 0": (pack([key(ALIGNMENT, U32, bytes(4))]), "alignment 0"),
    "alignment 48": (pack([key(ALIGNMENT, U32, struct.pack("<I", 48))]), "alignment 48"),
    "alignment 2 MiB": (pack([key(ALIGNMENT, U32, struct.pack("<I", 1 << 21))]), "to 1048576"),
    "tensor name": (pack(tensors=[tensor(b"n" * 64)]), "has 64 bytes, the limit is 63"),
    "no dimension": (pack(tensors=[tensor(shape=())]), "0 dimensions"),
    "5 dimensions": (pack(tensors=[tensor(shape=(1,) * 5)]), "5 dimensions"),
    "dimension 0": (pack(tensors=[tensor(shape=(4, 0))]), "shape (4, 0)"),
    "overflow": (pack(tensors=[tensor(shape=(1 << 32, 1 << 31))]), "below 2^63"),
    "ggml type": (pack(tensors=[tensor(kind=4)]), "ggml type 4"),
    "block": (pack(tensors=[tensor(shape=(33,), kind=Q8_0)]), "Q8_0 needs a multiple of 32"),
    "double tensor": (pack(tensors=[tensor(), tensor(offset=32)]), "'t' is there twice"),
    "offset": (pack(tensors=[tensor(offset=8)]), "starts at byte 8 of the data, expected 0"),
    "overlap": (pack(tensors=[tensor(), tensor(b"u")]), "byte 0 of the data, expected 32"),
    "outside": (pack(tensors=[tensor(shape=(1 << 20,))]), "'t' ends at byte 4194"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_with_what_and_where(folder: Path, name: str) -> None:
    content, words = DAMAGE[name]

    assert words in refusal(folder / "damaged.gguf", content)


def test_a_file_cut_anywhere_is_refused(sample: Path, folder: Path) -> None:
    content = sample.read_bytes()
    last = read_header(sample).tensors[-1]
    path = folder / "cut.gguf"

    for length in range(last.offset + last.nbytes):
        refusal(path, content[:length])


def read_within_bounds(path: Path, content: bytes) -> Header | None:
    """Read hostile `content`: ModelError is fine, taking long or much memory is not."""
    path.write_bytes(content)
    tracemalloc.start()
    start = time.perf_counter()
    header, reason = None, "none"
    try:
        header = read_header(path)
    except ModelError as error:
        reason = str(error)
    elapsed = time.perf_counter() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(reason.splitlines()) == 1
    assert elapsed < 1
    assert peak < 8 << 20
    return header


fuzzed = settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@fuzzed
@given(edits=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_changed_bytes_are_read_or_refused_within_bounds(
    sample: Path, folder: Path, edits: list[tuple[float, int]]
) -> None:
    content = bytearray(sample.read_bytes())
    for where, value in edits:
        content[int(where * (len(content) - 1))] = value

    header = read_within_bounds(folder / "fuzzed.gguf", bytes(content))

    for part in header.tensors if header else ():
        assert part.offset + part.nbytes <= len(content)


@fuzzed
@given(
    where=st.floats(0, 1),
    number=st.one_of(
        st.integers(0, (1 << 64) - 1), st.sampled_from([1 << n for n in range(8, 64)])
    ),
)
def test_absurd_counts_anywhere_are_read_or_refused_within_bounds(
    sample: Path, folder: Path, where: float, number: int
) -> None:
    content = bytearray(sample.read_bytes())
    at = int(where * (len(content) - 8))
    content[at : at + 8] = struct.pack("<Q", number)

    read_within_bounds(folder / "fuzzed.gguf", bytes(content))


@fuzzed
@given(tail=st.binary(max_size=300))
def test_noise_behind_the_magic_is_refused_within_bounds(folder: Path, tail: bytes) -> None:
    read_within_bounds(folder / "noise.gguf", b"GGUF\3\0\0\0" + tail)


def test_counts_that_a_huge_sparse_file_could_hold_are_still_bounded(folder: Path) -> None:
    path = folder / "sparse.gguf"
    array = key("a", ARRAY, struct.pack("<IQ", STRING, 1 << 36))
    path.write_bytes(pack([array]))
    os.truncate(path, 1 << 40)

    with pytest.raises(ModelError, match=r"claims 68719476736 elements .* the limit is 4194304"):
        read_header(path)


def test_weights_are_never_read(folder: Path) -> None:
    path = folder / "large.gguf"
    path.write_bytes(pack(tensors=[tensor(shape=(1 << 20, 1 << 12))]))
    os.truncate(path, 17 << 30)
    tracemalloc.start()

    header = read_header(path)

    assert 16 << 30 == header.tensors[0].nbytes
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_large_vocabulary_takes_a_moment_and_little_memory(folder: Path) -> None:
    path = folder / "vocabulary.gguf"
    words = b"".join(text(b"token%d" % n) for n in range(300_000))
    path.write_bytes(pack([key("tokens", ARRAY, struct.pack("<IQ", STRING, 300_000) + words)]))
    start = time.perf_counter()

    tokens = read_header(path).metadata["tokens"]

    assert time.perf_counter() - start < 2  # 0.06 s on an idle core
    assert isinstance(tokens, Array)
    assert "token299999" == tokens.strings()[-1]
