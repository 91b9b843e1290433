import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from sapwood.kernels.tuning import (
    TABLES,
    TuningError,
    load_table,
    own_table_path,
    parse_table,
    shipped_table,
)

FILES = sorted(TABLES.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_committed_table_is_one_and_is_written_back_as_it_stands(path: Path) -> None:
    table = parse_table(path.read_text(), path.name)
    assert parse_table(table.dump(), "dumped") == table


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("head_dim", [4, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("group_size", range(1, 17))
@pytest.mark.parametrize("kv_bytes", [1, 2, 4])
def test_every_table_has_tiles_for_every_kind_of_head(
    path: Path, head_dim: int, group_size: int, kv_bytes: int
) -> None:
    table = parse_table(path.read_text(), path.name)
    shapes = table.tile_shapes(head_dim=head_dim, group_size=group_size, kv_bytes=kv_bytes)
    assert shapes.narrow.rows >= group_size, "a tile has at least one query row"


def test_a_head_that_no_entry_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="heads of 512"):
        load_table(None).tile_shapes(head_dim=512, group_size=1, kv_bytes=2)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAPWOOD_CACHE", str(tmp_path / "cache"))


def test_what_was_measured_on_this_machine_comes_first() -> None:
    own = json.loads((TABLES / "default.json").read_text()) | {"gpu": "here"}
    path = own_table_path("NVIDIA H200")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(own))
    assert load_table("NVIDIA H200").gpu == "here"
    assert load_table(None).gpu == "default"


@pytest.mark.parametrize("broken", [b'{"gpu": "NVI', b"\xff\xfe", b""])
def test_a_broken_table_of_this_machine_is_told_and_is_not_what_is_measured_from(
    broken: bytes,
) -> None:
    path = own_table_path("NVIDIA H200")
    path.parent.mkdir(parents=True)
    path.write_bytes(broken)
    with pytest.raises(TuningError, match=re.escape(str(path))):
        load_table("NVIDIA H200")
    assert shipped_table("NVIDIA H200").attention


def test_a_gpu_gets_its_own_table_and_others_the_default(tmp_path: Path) -> None:
    shutil.copy(TABLES / "default.json", tmp_path)
    own = json.loads((TABLES / "default.json").read_text()) | {"gpu": "NVIDIA H200"}
    (tmp_path / "nvidia-h200.json").write_text(json.dumps(own))
    assert load_table("NVIDIA H200", tmp_path).gpu == "NVIDIA H200"
    assert load_table("NVIDIA A10G", tmp_path).gpu == "default"
    assert load_table(None, tmp_path).gpu == "default"


def first_entry(document: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = document["attention"][0]
    return entry


def test_a_wrong_field_is_refused_and_named() -> None:
    text = (TABLES / "default.json").read_text()

    def refusal(change: Any) -> str:
        document = json.loads(text)
        change(document)
        with pytest.raises(TuningError) as caught:
            parse_table(json.dumps(document), "x.json")
        return str(caught.value)

    assert "x.json has color" in refusal(lambda d: d.update(color=1))
    assert "x.json lacks gpu" in refusal(lambda d: d.pop("gpu"))
    assert "x.json.gpu is 3" in refusal(lambda d: d.update(gpu=3))
    assert "max_head_dim is True" in refusal(lambda d: first_entry(d).update(max_head_dim=True))
    assert "kv_bytes is 3" in refusal(lambda d: first_entry(d).update(kv_bytes=3))
    assert "rows of narrow tiles is 48" in refusal(
        lambda d: first_entry(d)["shapes"]["narrow"].update(rows=48)
    )
    assert "rows is 0" in refusal(lambda d: first_entry(d)["shapes"]["narrow"].update(rows=0))
    assert "attention is {}" in refusal(lambda d: d.update(attention={}))


def test_what_is_not_json_is_refused() -> None:
    with pytest.raises(TuningError, match="x.json is not JSON"):
        parse_table("{", "x.json")
