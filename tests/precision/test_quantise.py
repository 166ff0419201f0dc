# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Quantising rounds and scales as transformer-engine says; its files are named beside the numbers.

`recipe_common.cuh`, `delayed_scaling.cu` are in transformer_engine/common/recipe, `ptx.cuh` in
common/util, `quantize_scale_calc.py` in tests/pytorch/references of NVIDIA/TransformerEngine.
"""

import math

import pytest
import torch

from megatron_leangrpo.precision.quantise import (
    E4M3,
    E5M2,
    TENSOR,
    Blocks,
    amax,
    cast,
    delayed_scale_of,
    e8m0_of,
    quantise,
    scale_of,
)
from megatron_leangrpo.precision.recipe import Fp8Settings, pad_rows

INF, NAN = math.inf, math.nan
FLOAT32_MAX = torch.finfo(torch.float32).max
BLOCKWISE, MXFP8 = Blocks(1, 128, power_of_two=True), Blocks(1, 32, e8m0=True)

# Value, E4M3, E5M2. Both formats are OCP's (Open Compute 8-bit floating point, table 1): E4M3 has
# subnormals of 2**-9 and ends at 448, E5M2 has subnormals of 2**-16 and ends at 57344.
EDGES = [
    (0.0, 0.0, 0.0),
    (-0.0, -0.0, -0.0),
    (1.0, 1.0, 1.0),
    # ties: to the even code
    (1.0625, 1.0, 1.0),
    (1.1875, 1.25, 1.25),
    (1.125, 1.125, 1.0),
    (1.375, 1.375, 1.5),
    # subnormals, the tie below the smallest, and what is above and below it
    (2**-9, 2**-9, 2**-9),
    (2**-10, 0.0, 2**-10),
    (1.0001 * 2**-10, 2**-9, 2**-10),
    (3 * 2**-10, 2**-8, 3 * 2**-10),
    (2**-16, 0.0, 2**-16),
    (2**-17, 0.0, 0.0),
    (-1.0001 * 2**-17, -0.0, -(2**-16)),
    # the largest, the tie to what would be next, and overflow (cvt.rn.satfinite)
    (448.0, 448.0, 448.0),
    (464.0, 448.0, 448.0),
    (465.0, 448.0, 448.0),
    (-1e9, -448.0, -57344.0),
    (57344.0, 448.0, 57344.0),
    (61440.0, 448.0, 57344.0),
    (INF, 448.0, 57344.0),
    (-INF, -448.0, -57344.0),
    (NAN, NAN, NAN),
]


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal as float32 with signs of zeros; NaN is NaN."""
    return bool(
        torch.where(
            expected.isnan(), actual.isnan(), actual.view(torch.int32) == expected.view(torch.int32)
        ).all()
    )


@pytest.mark.parametrize(("column", "dtype"), [(1, E4M3), (2, E5M2)])
def test_edge_values_round_to_the_nearest_code_and_saturate(column: int, dtype: torch.dtype):
    values = torch.tensor([row[0] for row in EDGES])
    assert same_bits(cast(values, dtype).float(), torch.tensor([row[column] for row in EDGES]))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_cast_is_the_nearest_of_all_codes(dtype: torch.dtype):
    """Against the definition: the closest of the 256 codes, and of two as close the even one."""
    codes = torch.arange(128, dtype=torch.uint8)
    table = codes.view(dtype).double()
    codes, table = codes[table.isfinite()], table[table.isfinite()]
    between = (table[1:] + table[:-1]) / 2
    drawn = torch.rand(2000, generator=torch.Generator().manual_seed(0)).double() * table.max()
    values = torch.cat((table, between, drawn, drawn / 1e4)).float()
    distance = (values.double()[:, None] - table).abs()
    # An odd code loses a tie by less than any distance that is none.
    expected = codes[(distance + (codes % 2) * 1e-12).argmin(dim=1)]
    assert torch.equal(cast(values, dtype).view(torch.uint8), expected)
    assert torch.equal(cast(-values, dtype).float(), -cast(values, dtype).float())


def test_within_range_a_cast_is_torchs_own():
    values = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 50
    for dtype in (E4M3, E5M2):
        kept = values.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
        assert torch.equal(cast(values, dtype).view(torch.uint8), kept.to(dtype).view(torch.uint8))


@pytest.mark.parametrize(
    ("largest", "exact", "power"),
    [
        # compute_scale_from_amax of recipe_common.cuh: 448 / amax, or its power of two below.
        (448.0, 1.0, 1.0),
        (1.0, 448.0, 256.0),
        (3.0, 448 / 3, 128.0),
        (3.5, 128.0, 128.0),
        (1000.0, 0.448, 0.25),
        (0.0, 1.0, 1.0),
        (INF, 1.0, 1.0),
        (NAN, 1.0, 1.0),
        # 448 / 1e-37 overflows: the largest float32, whose power of two is 2**127.
        (1e-37, FLOAT32_MAX, 2.0**127),
        (1e-35, 448 / 1e-35, 2.0**125),
    ],
)
def test_scales_of_current_and_block_scaling(largest: float, exact: float, power: float):
    for expected, power_of_two in ((exact, False), (power, True)):
        found = scale_of(torch.tensor(largest), E4M3, power_of_two)
        assert found.item() == torch.tensor(expected).item()


def test_an_overflowing_scale_of_block_scaling_is_the_inputs_largest_number():
    tiny = torch.full((1, 128), 1e-38)
    # compute_scale_from_types: value_for_inf is that of IType.
    for dtype in (torch.float32, torch.bfloat16):
        by_block = quantise(tiny.to(dtype), E4M3, Blocks(1, 128)).scale_inv
        assert by_block.item() == torch.tensor(torch.finfo(dtype).max).reciprocal().item()
        by_tensor = quantise(tiny.to(dtype), E4M3, TENSOR).scale_inv
        assert by_tensor.item() == torch.tensor(FLOAT32_MAX).reciprocal().item()


@pytest.mark.parametrize(
    ("largest", "biased"),
    [
        # float_to_e8m0 of ptx.cuh of amax / 448: the exponent, one more where there is a fraction.
        (448.0, 127),
        (448.0001, 128),
        (449.0, 128),
        (1.0, 119),
        (0.875, 118),
        (0.0, 0),
        (INF, 0xFE),
        (NAN, 0xFF),
        # Quotients of 2**-126, below it and at most half of it (a subnormal float32).
        (448 * 2.0**-126, 1),
        (1.5 * 448 * 2.0**-127, 1),
        (448 * 2.0**-127, 0),
        (FLOAT32_MAX, 247),
    ],
)
def test_mxfp8_scales_are_exponents_rounded_up(largest: float, biased: int):
    assert e8m0_of(torch.tensor(largest), E4M3).item() == biased


@pytest.mark.parametrize(
    ("largest", "margin", "expected"),
    [
        # amax_and_scale_update of delayed_scaling.cu; the previous scale is 7.
        (2.0, 0, 224.0),
        (2.0, 3, 28.0),
        (0.0, 0, 7.0),
        (INF, 0, 7.0),
        (NAN, 0, 7.0),
        (1e-38, 0, FLOAT32_MAX),
    ],
)
def test_scales_of_delayed_scaling(largest: float, margin: int, expected: float):
    scale = delayed_scale_of(torch.tensor(largest), torch.tensor(7.0), E4M3, margin)
    assert scale.item() == torch.tensor(expected).item()


def test_a_maximum_does_not_see_nan():
    assert amax(torch.tensor([1.0, NAN, -3.0])).item() == 3.0


@pytest.mark.parametrize("blocks", [TENSOR, BLOCKWISE, MXFP8], ids=["tensor", "1x128", "1x32"])
def test_nan_stays_alone_in_its_block(blocks: Blocks):
    x = torch.linspace(-2, 2, 128).view(1, 128)
    damaged = x.clone()
    damaged[0, 70] = NAN
    back = quantise(damaged, E4M3, blocks).dequantise(torch.float32)
    expected = quantise(x, E4M3, blocks).dequantise(torch.float32)
    expected[0, 70] = NAN
    assert same_bits(back, expected)


def test_infinity_costs_a_block_its_scale_and_mxfp8_its_numbers():
    x = torch.tensor([[INF, 1.0, -500.0]])
    for blocks in (TENSOR, BLOCKWISE):
        back = quantise(x, E4M3, blocks).dequantise(torch.float32)
        assert torch.equal(back, torch.tensor([[448.0, 1.0, -448.0]]))
    # The exponent 0xFE has the reciprocal 0 (exp2f_rcp): infinity times it is NaN.
    back = quantise(x, E4M3, MXFP8).dequantise(torch.float32)
    assert same_bits(back, torch.tensor([[NAN, 0.0, -0.0]]))


def test_blocks_have_scales_of_their_own():
    x = torch.ones(2, 160)
    x[0, 128:], x[1, 32:64] = 1000.0, 2.0**-6
    inverse = quantise(x, E4M3, BLOCKWISE).scale_inv
    assert torch.equal(inverse, torch.tensor([[2.0**-8, 4.0], [2.0**-8, 2.0**-8]]))
    exponents = quantise(x, E4M3, MXFP8).scale_inv
    assert exponents.tolist() == [[119, 119, 119, 119, 129], [119, 113, 119, 119, 119]]
    square = quantise(x, E4M3, Blocks(128, 128, power_of_two=True)).scale_inv
    assert torch.equal(square, torch.tensor([[2.0**-8, 4.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["current", "blockwise", "mxfp8"])
def test_rows_of_padding_change_no_other_row(recipe: str, dtype: torch.dtype):
    settings = Fp8Settings(recipe)
    x = torch.randn(37, 200, generator=torch.Generator().manual_seed(2)).to(dtype)
    padded = pad_rows(x, settings.alignment)
    assert padded.shape[0] % settings.alignment == 0
    for along_rows in (False, True):
        blocks = settings.vectors(along_rows)
        expected = quantise(x, E4M3, blocks).dequantise(dtype)
        assert torch.equal(quantise(padded, E4M3, blocks).dequantise(dtype)[:37], expected)
        assert not quantise(padded, E4M3, blocks).dequantise(dtype)[37:].any()


@pytest.mark.parametrize("recipe", ["current", "blockwise", "mxfp8"])
def test_the_error_of_a_normal_tensor_is_that_of_three_bits(recipe: str):
    """A mantissa of three bits is wrong by at most 1/16, and by 0.026 on average."""
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(3))
    back = quantise(x, E4M3, Fp8Settings(recipe).vectors()).dequantise(torch.float32)
    assert 0.02 < ((back - x).norm() / x.norm()).item() < 0.03
