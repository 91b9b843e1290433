"""Options are sorted into groups, checked, and never ignored."""

from dataclasses import fields

import pytest

from sapwood import ConfigError
from sapwood.runtime.config import BatchingMode, EngineConfig, option_groups
from sapwood.runtime.policy import POLICIES, load_policy


def test_options_land_in_their_groups() -> None:
    config = EngineConfig.from_options(
        "m", block_size=4, max_num_seqs=3, dtype="bfloat16", constraint_deadline_ms=5000
    )
    assert (config.model.model, config.model.dtype) == ("m", "bfloat16")
    assert config.cache.block_size == 4
    assert config.scheduler.max_num_seqs == 3
    assert config.constraints.constraint_deadline_ms == 5000


def test_no_two_groups_share_an_option() -> None:
    config = EngineConfig()
    total = sum(len(fields(getattr(config, group.name))) for group in fields(config))
    assert len(option_groups()) == total


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'blok_size'.*block_size"):
        EngineConfig.from_options("m", blok_size=4)


def test_a_model_path_is_told_to_be_called_model() -> None:
    with pytest.raises(ConfigError, match=r"'model_path'; did you mean model\?"):
        EngineConfig.from_options(model_path="m")


def test_a_mode_may_be_given_as_a_string() -> None:
    assert EngineConfig.from_options(mode="static").scheduler.mode is BatchingMode.STATIC


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("constraint_backend", "lmql"),
        ("constraint_deadline_ms", 0),
        ("constraint_deadline_ms", 5001),
        ("constraint_cache_memory", -1),
    ],
)
def test_an_option_of_constraints_out_of_range_is_refused(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{option} is {value!r}"):
        EngineConfig.from_options(**{option: value})


@pytest.mark.parametrize("name", POLICIES)
def test_every_registered_policy_loads(name: str) -> None:
    assert load_policy(name).order([], lambda sequence: 0, lambda sequence: ()) == []
