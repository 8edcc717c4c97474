"""What the machine can do at most: which products a level has, and that figures are of that level."""

from __future__ import annotations

import pytest
from twofold._core import weight_formats
from twofold._testing import kernels
from twofold.api.errors import ConfigError
from twofold.blocks import ops

RATES = {
    "generic": {"f32"},
    "avx2": {"f32", "int8"},
    "avx512_vnni": {"f32", "int8"},
    "avx512_bf16": {"f32", "int8", "bf16"},
    "amx": {"f32", "int8", "bf16", "bf16_tiles", "int8_tiles"},
}
BRIEF = {"read_bytes": 1 << 20, "round_s": 0.001}


@pytest.fixture(scope="module")
def pool() -> ops.ThreadPool:
    return ops.ThreadPool(2)


@pytest.mark.parametrize("level", [level for level in RATES if level in kernels.supported_levels()])
def test_a_level_has_its_own_products(pool: ops.ThreadPool, level: str) -> None:
    found = ops.measure_ceilings(pool, level=level, **BRIEF)
    assert set(found) == {"read_gb_per_s", "fork_join_us", *(f"{kind}_gop_per_s" for kind in RATES[level])}
    assert all(value > 0 for value in found.values())


@pytest.mark.slow  # by the clock
@pytest.mark.slow  # it compares speeds
@pytest.mark.skipif("avx2" not in kernels.supported_levels(), reason="one level only")
def test_wider_registers_do_more(pool: ops.ThreadPool) -> None:
    scalar, wide = (ops.measure_ceilings(pool, level=level, **BRIEF) for level in ("generic", "avx2"))
    # Eight times by the instructions; losing the core meanwhile must not reverse the order.
    assert wide["f32_gop_per_s"] > 2 * scalar["f32_gop_per_s"]


def test_a_format_is_multiplied_in_products_that_the_level_has(pool: ops.ThreadPool) -> None:
    has = ops.measure_ceilings(pool, **BRIEF)
    for name in weight_formats():
        assert f"{ops.products_of(name)}_gop_per_s" in has
    assert ops.products_of("f32") == "f32"
    assert ops.products_of("q8_0").startswith("int8")


@pytest.mark.parametrize(
    "wrong", [{"level": "avx1024"}, {"read_bytes": 0}, {"round_s": 0.0}, {"round_s": float("nan")}]
)
def test_what_cannot_be_measured_is_refused(pool: ops.ThreadPool, wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ops.measure_ceilings(pool, **wrong)
