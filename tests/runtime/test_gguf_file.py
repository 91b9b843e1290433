"""The reader of GGUF files believes no length, and says what is wrong with a file."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from sapwood.runtime.errors import ModelError, UnsupportedModelError
from sapwood.runtime.gguf_convert import convert_gguf
from sapwood.runtime.gguf_file import read_gguf
from tests.runtime.gguf_files import random_model, saved_tensors, write_model

UINT8, UINT32, FLOAT32, STRING, ARRAY = 0, 4, 6, 8, 9
F32 = 0


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value(name: str, kind: int, content: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + content


def tensor(name: str, sizes: list[int], *, kind: int = F32, offset: int = 0) -> bytes:
    shape = struct.pack(f"<{len(sizes)}Q", *sizes)
    return string(name) + struct.pack("<I", len(sizes)) + shape + struct.pack("<IQ", kind, offset)


def file_of(
    folder: Path,
    *,
    values: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: bytes = b"",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> Path:
    num_tensors, num_values = counts or (len(tensors), len(values))
    header = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values)
    header += b"".join(values) + b"".join(tensors)
    path = folder / "model.gguf"
    path.write_bytes(header + b"\0" * (-len(header) % 32) + data)
    return path


def test_what_the_library_writes_is_what_is_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    written: dict[str, Any] = {
        "text": "naïve ☕️",
        "numbers": [1, 2, 3],
        "texts": ["a", "", "bc"],
        "yes": True,
        "small": 7,
        "tenth": 0.1,
    }
    writer.add_string("text", written["text"])
    writer.add_array("numbers", written["numbers"])
    writer.add_array("texts", written["texts"])
    writer.add_bool("yes", True)
    writer.add_uint8("small", 7)
    writer.add_float32("tenth", 0.1)
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((3, 2, 64)).astype(np.float32)
    kinds = gguf.GGMLQuantizationType
    for kind in (kinds.F32, kinds.F16, kinds.Q8_0, kinds.Q4_1):
        writer.add_tensor(kind.name, gguf.quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(tmp_path / "model.gguf")
    assert {name: file.metadata[name] for name in written} == written
    assert [tensor.name for tensor in file.tensors] == ["F32", "F16", "Q8_0", "Q4_1"]
    for stored in file.tensors:
        kind = kinds[stored.name]
        expected = gguf.dequantize(gguf.quantize(weights, kind), kind)
        assert stored.shape == (3, 2, 64)
        assert np.array_equal(stored.floats(), expected)
        assert np.array_equal(stored.part(1).floats(), expected[1])


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"counts": (0, 2**60)}, "ends before"),
        ({"counts": (2**60, 0)}, "ends before"),
        ({"values": (struct.pack("<Q", 2**63),)}, "ends before the 9223372036854775808 bytes"),
        ({"values": (value("a", STRING, struct.pack("<Q", 2**40)),)}, "ends before"),
        ({"values": (value("a", ARRAY, struct.pack("<IQ", UINT8, 2**62)),)}, "ends before"),
        ({"values": (value("a", ARRAY, struct.pack("<IQ", STRING, 2**62)),)}, "ends before"),
        ({"values": (value("a", ARRAY, struct.pack("<IQ", ARRAY, 1)),)}, "unknown kind 9"),
        ({"values": (value("a", 99, b""),)}, "unknown kind 99"),
        ({"values": (value("a", UINT8, b"a"), value("a", UINT8, b"b"))}, "'a' twice"),
        ({"values": (value("a", STRING, struct.pack("<Q", 1) + b"\xff"),)}, "can't decode"),
        (
            {"values": (value("general.alignment", UINT32, struct.pack("<I", 0)),)},
            "alignment is 0, not a power of two",
        ),
        ({"values": (value("general.alignment", STRING, string("x")),)}, "alignment is 'x'"),
        ({"tensors": (tensor("t", [2**40, 2**40]),)}, "ends before the end of 't'"),
        ({"tensors": (tensor("t", [4], offset=2**63),)}, "ends before the end of 't'"),
        ({"tensors": (tensor("t", [4, 0]),)}, "not whole blocks"),
        ({"tensors": (tensor("t", [33], kind=8),)}, "not whole blocks"),
        ({"tensors": (tensor("t", [4], kind=999),)}, "999"),
        ({"tensors": (tensor("t", []),)}, "'t' has 0 dimensions"),
        ({"tensors": (tensor("t", [1] * 5),)}, "'t' has 5 dimensions"),
        ({"tensors": (tensor("t", [1]), tensor("t", [1])), "data": b"\0" * 8}, "of one name"),
        ({"version": 1}, "version is 1; read are 2 and 3"),
        ({"version": 3 << 24}, "version is 50331648"),
    ],
)
def test_a_broken_file_is_named_and_nothing_is_made_room_for(
    tmp_path: Path, parts: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=f"not a readable GGUF file.*{said}"):
        read_gguf(file_of(tmp_path, **parts))


def test_a_header_beyond_any_vocabulary_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sapwood.runtime.gguf_file._MAX_HEADER_BYTES", 100)
    with pytest.raises(ModelError, match="header is longer than 100 bytes"):
        read_gguf(file_of(tmp_path, values=(value("a", STRING, string("x" * 200)),)))


@pytest.mark.parametrize("content", [b"", b"GG", b"not at all", b"GGUF"])
def test_what_is_no_gguf_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="not a readable GGUF file"):
        read_gguf(path)


def test_a_part_of_a_split_file_says_how_to_join_it(tmp_path: Path) -> None:
    count = value("split.count", UINT32, struct.pack("<I", 3))
    with pytest.raises(UnsupportedModelError, match="one of 3 parts; join them"):
        read_gguf(file_of(tmp_path, values=(count,)))


def test_a_kind_of_numbers_that_nobody_dequantises_is_named(tmp_path: Path) -> None:
    path = file_of(tmp_path, tensors=(tensor("t", [4], kind=24),), data=b"\0" * 4)
    (stored,) = read_gguf(path).tensors
    with pytest.raises(UnsupportedModelError, match="t is stored as I8"):
        stored.floats()


def test_a_file_with_any_bytes_changed_is_converted_or_refused(tmp_path: Path) -> None:
    """Never another error: 400 files, each with a few bytes of its header changed."""
    model = random_model("qwen2", num_hidden_layers=1, hidden_size=8, intermediate_size=8)
    path = tmp_path / "model.gguf"
    write_model(path, model, saved_tensors(model, tmp_path / "saved"))
    whole = path.read_bytes()
    header_len = whole.index(b"blk.0.") + 400
    rng = random.Random(0)
    num_refused = 0
    for index in range(400):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(24, header_len)] = rng.choice(
                (0, 1, 9, 127, 255, rng.randrange(256))
            )
        path.write_bytes(data)
        folder = tmp_path / str(index)
        folder.mkdir()
        try:
            convert_gguf(path, folder)
        except ModelError:
            num_refused += 1
    assert 100 < num_refused < 400
