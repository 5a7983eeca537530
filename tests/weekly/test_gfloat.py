"""halfbits.formats against gfloat, Graphcore's reference of the OCP formats, where it is installed.

uv run --with gfloat pytest --weekly tests/weekly/test_gfloat.py
"""

import numpy as np
import pytest

from halfbits.formats import BLOCK_FORMATS, E8M0, FORMATS

gfloat = pytest.importorskip("gfloat")
formats = pytest.importorskip("gfloat.formats")
pytestmark = pytest.mark.weekly


def same_layout(name, has_negative_zero=True, **differences):
    """A FormatInfo of gfloat for a format that gfloat has no name for."""
    form = FORMATS[name]
    layout = {
        "k": form.bits,
        "precision": form.mantissa_bits + 1,
        "bias": form.bias,
        "has_nz": has_negative_zero,
        "has_subnormals": True,
        "is_signed": True,
        "is_twos_complement": False,
    }
    return gfloat.FormatInfo(name=name, **layout, **differences)


FNUZ = {"has_negative_zero": False, "domain": gfloat.Domain.Finite, "num_high_nans": 0}
GFLOAT = {
    "fp32": formats.format_info_binary32,
    "tf32": same_layout("tf32", domain=gfloat.Domain.Extended, num_high_nans=2**10 - 1),
    "bf16": formats.format_info_bfloat16,
    "fp16": formats.format_info_binary16,
    "fp8_e5m2": formats.format_info_ocp_e5m2,
    "fp8_e4m3fn": formats.format_info_ocp_e4m3,
    "fp8_e5m2fnuz": same_layout("fp8_e5m2fnuz", **FNUZ),
    "fp8_e4m3fnuz": same_layout("fp8_e4m3fnuz", **FNUZ),
    "fp6_e3m2fn": formats.format_info_ocp_e3m2,
    "fp6_e2m3fn": formats.format_info_ocp_e2m3,
    "fp4_e2m1fn": formats.format_info_ocp_e2m1,
}
GFLOAT_BLOCKS = {
    "mxfp8_e5m2": formats.format_info_mxfp8_e5m2,
    "mxfp8_e4m3": formats.format_info_mxfp8_e4m3,
    "mxfp6_e3m2": formats.format_info_mxfp6_e3m2,
    "mxfp6_e2m3": formats.format_info_mxfp6_e2m3,
    "mxfp4": formats.format_info_mxfp4_e2m1,
}


def same_numbers(ours, theirs):
    """Equal values and signs of zeros; NaNs equal whatever their sign, which gfloat has not."""
    number = ~np.isnan(ours)
    equal = np.array_equal(ours, theirs, equal_nan=True)
    return equal and np.array_equal(np.signbit(ours[number]), np.signbit(theirs[number]))


def random_values(name):
    """Numbers from below the smallest to beyond the maximum, with the ties of some neighbours."""
    form = FORMATS[name]
    rng = np.random.default_rng(0)
    low = np.log2(form.smallest_subnormal) - 3
    high = np.log2(form.max) + 3
    values = rng.choice([-1, 1], 200_000) * np.exp2(rng.uniform(low, high, 200_000))
    codes = rng.integers(0, form.encode(form.max), 100_000)
    ties = (form.decode(codes) + form.decode(codes + 1)) / 2
    around = [ties, np.nextafter(ties, -np.inf), np.nextafter(ties, np.inf), [0.0, -0.0]]
    return np.concatenate([values, *around])


def test_every_format_is_compared():
    assert set(GFLOAT) == set(FORMATS)
    assert set(GFLOAT_BLOCKS) == set(BLOCK_FORMATS) - {"nvfp4"}


@pytest.mark.parametrize("name", GFLOAT)
def test_every_code_decodes_as_in_gfloat(name):
    bits = FORMATS[name].bits
    codes = np.arange(2**bits, dtype=np.int64) if bits < 32 else np.arange(0, 2**32, 4093)
    assert same_numbers(FORMATS[name].decode(codes), gfloat.decode_ndarray(GFLOAT[name], codes))


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("name", GFLOAT)
def test_random_numbers_and_ties_encode_as_in_gfloat(name, saturate):
    form = FORMATS[name]
    values = random_values(name)
    if form.specials != "none":
        values = np.concatenate([values, [np.inf, -np.inf]])
    rounding = gfloat.RoundMode.TiesToEven
    # gfloat refuses what is past the maximum of a format that has no code for it.
    gfloat_saturates = saturate or form.specials == "none"
    rounded = gfloat.round_ndarray(GFLOAT[name], values, rounding, gfloat_saturates)
    codes = gfloat.encode_ndarray(GFLOAT[name], rounded).astype(np.int64)
    ours = form.encode(values, saturate)
    number = ~np.isnan(form.decode(ours))
    assert np.array_equal(ours[number], codes[number])
    assert np.isnan(form.decode(codes[~number])).all()


def test_every_scale_is_that_of_gfloat():
    codes = np.arange(256)
    theirs = gfloat.decode_ndarray(formats.format_info_ocp_e8m0, codes)
    assert same_numbers(E8M0.decode(codes), theirs)


@pytest.mark.parametrize("exponent", [-130, -60, 0, 7, 100])
@pytest.mark.parametrize("name", GFLOAT_BLOCKS)
def test_blocks_are_those_of_gfloat(name, exponent):
    form = BLOCK_FORMATS[name]
    info = GFLOAT_BLOCKS[name]
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((100, 32)) * np.exp2(rng.uniform(-12, 0, (100, 32)))
    rows[0] = 0
    values = (rows * 2.0**exponent).astype(np.float32).astype(np.float64)
    blocks = form.encode(values)
    rounded = form.round(values)
    for row, block in enumerate(values):
        scale = gfloat.compute_scale_amax(info.etype.emax, block)
        scale_code, *codes = gfloat.encode_block(info, scale, block / scale)
        assert [scale_code] == blocks.scales[row].tolist()
        assert codes == blocks.codes[row].tolist()
        decoded = np.fromiter(gfloat.decode_block(info, [scale_code, *codes]), float)
        assert same_numbers(rounded[row], decoded)
        quantized = gfloat.quantize_block(info, block, gfloat.compute_scale_amax)
        assert same_numbers(rounded[row], quantized)
