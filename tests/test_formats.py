"""helpers.formats against ml_dtypes, NumPy and torch: every code decoded, a million numbers and every tie encoded."""

import warnings

import ml_dtypes
import numpy as np
import pytest
import torch

from helpers.formats import FORMATS, FloatFormat

NUMPY = {
    "fp32": np.float32,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "fp4_e2m1fn": ml_dtypes.float4_e2m1fn,
}
TORCH = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3fn": torch.float8_e4m3fn,
}
assert set(NUMPY) | {"tf32"} == set(FORMATS), "name in NUMPY the type of ml_dtypes to compare a new format with"
SMALL = [name for name in NUMPY if name != "fp32"]
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan])


def same(a, b):
    """Equal values, signs of zeros and NaNs included; the payloads of NaNs are not looked at."""
    return np.array_equal(a, b, equal_nan=True) and np.array_equal(np.signbit(a), np.signbit(b))


def all_codes(name):
    return np.arange(2 ** FORMATS[name].bits)


def rounded_to_odd(values):
    """float64 to float32, cut off towards zero, with the last bit set if anything was cut off.

    ml_dtypes 0.6 converts arrays of float64 by way of float32, and so rounds twice: its bfloat16 of
    1 + 2**-8 + 2**-40 is 1. From a float32 that was rounded to odd, the second rounding is right (Boldo and
    Melquiond, IEEE Transactions on Computers 57, 2008). NumPy's own float16 needs no such help.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        near = values.astype(np.float32)
        too_far = np.abs(near.astype(np.float64)) > np.abs(values)
        cut = np.where(too_far, np.nextafter(near, np.float32(0)), near)
        inexact = np.isfinite(values) & (cut.astype(np.float64) != values)
    return (cut.view(np.uint32) | inexact).view(np.float32)


def encoded_by_others(name, values):
    source = values if name in ("fp16", "fp32") else rounded_to_odd(values)
    with np.errstate(over="ignore", invalid="ignore"):
        codes = source.astype(NUMPY[name])
    codes = codes.view(f"u{codes.itemsize}")
    return codes & 0xF if name == "fp4_e2m1fn" else codes


def ties_and_their_neighbours(name):
    """The midpoint of any two neighbours, and of the maximum and what would come next, with the float64s around it."""
    numbers = FORMATS[name].decode(all_codes(name))
    numbers = np.unique(numbers[np.isfinite(numbers)])
    beyond = numbers[-1] + FORMATS[name].spacing(numbers[-1])
    numbers = np.concatenate([numbers, [beyond]])
    middle = (numbers[:-1] + numbers[1:]) / 2
    middle = np.concatenate([middle, -middle])
    return np.concatenate([middle, np.nextafter(middle, -np.inf), np.nextafter(middle, np.inf)])


@pytest.mark.parametrize("name", SMALL)
def test_every_code_decodes_as_in_ml_dtypes(name):
    codes = all_codes(name)
    theirs = codes.astype(f"u{np.dtype(NUMPY[name]).itemsize}").view(NUMPY[name])
    with np.errstate(invalid="ignore"):
        theirs = theirs.astype(np.float64)
    assert same(FORMATS[name].decode(codes), theirs)


@pytest.mark.parametrize("name", TORCH)
def test_every_code_decodes_as_in_torch(name):
    codes = torch.arange(2 ** FORMATS[name].bits, dtype=torch.int32)
    integers = torch.uint16 if FORMATS[name].bits == 16 else torch.uint8
    theirs = codes.to(integers).view(TORCH[name]).to(torch.float64)
    assert same(FORMATS[name].decode(codes), theirs.numpy())


@pytest.mark.parametrize("name", NUMPY)
def test_a_million_random_doubles_encode_as_in_ml_dtypes(name):
    rng = np.random.default_rng(0)
    any_bits = rng.integers(0, 2**64, 500_000, dtype=np.uint64).view(np.float64)
    any_bits = any_bits[~np.isnan(any_bits)]
    low, high = np.log2(FORMATS[name].smallest_subnormal) - 3, np.log2(FORMATS[name].max) + 3
    in_range = rng.choice([-1, 1], 1_000_000) * np.exp2(rng.uniform(low, high, 1_000_000))
    values = np.concatenate([any_bits, in_range, SPECIAL])
    codes = FORMATS[name].encode(values)
    assert np.count_nonzero(codes != encoded_by_others(name, values)) == 0
    assert codes.dtype == (np.uint8 if FORMATS[name].bits <= 8 else f"u{FORMATS[name].bits // 8}")


@pytest.mark.parametrize("name", SMALL)
def test_every_tie_and_its_two_neighbours_encode_as_in_ml_dtypes(name):
    values = ties_and_their_neighbours(name)
    assert np.count_nonzero(FORMATS[name].encode(values) != encoded_by_others(name, values)) == 0


@pytest.mark.parametrize("name", [name for name in SMALL if FORMATS[name].bits <= 8])
def test_ties_encode_as_in_ml_dtypes_scalars_too(name):
    """ml_dtypes converts one Python float without going through float32, so nothing is rounded to odd here."""
    values = ties_and_their_neighbours(name)
    theirs = np.array([NUMPY[name](value) for value in values.tolist()]).view(np.uint8)
    assert np.count_nonzero(FORMATS[name].encode(values) != theirs & 2 ** FORMATS[name].bits - 1) == 0


def test_tf32_is_fp32_rounded_to_ten_bits_of_fraction():
    rng = np.random.default_rng(1)
    values = rng.integers(0, 2**32, 1_000_000, dtype=np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    bits = values.view(np.uint32).astype(np.int64)
    half_less_one, last_kept = 2**12 - 1, bits >> 13 & 1  # 13 of 23 fraction bits go; ties to even
    assert np.array_equal(FORMATS["tf32"].encode(values), bits + half_less_one + last_kept >> 13)
    near_tie = 1 + 2.0**-11 + np.array([-(2.0**-40), 0, 2.0**-40])  # the last would be a tie again in float32
    assert (FORMATS["tf32"].encode(near_tie) - FORMATS["tf32"].encode(1.0)).tolist() == [0, 0, 1]
    codes = all_codes("tf32")
    theirs = (codes.astype(np.uint32) << 13).view(np.float32)
    assert same(FORMATS["tf32"].decode(codes), theirs)


def test_fp32_decodes_as_in_numpy():
    codes = np.random.default_rng(2).integers(0, 2**32, 1_000_000, dtype=np.uint32)
    codes = np.concatenate([codes, all_codes("fp16"), all_codes("fp16") << 16])
    assert same(FORMATS["fp32"].decode(codes), codes.astype(np.uint32).view(np.float32))


@pytest.mark.parametrize("name", TORCH)
def test_limits_are_torch_finfo_s(name):
    ours, theirs = FORMATS[name], torch.finfo(TORCH[name])
    assert (ours.bits, ours.max, ours.smallest_normal, ours.eps) == (
        theirs.bits,
        theirs.max,
        theirs.smallest_normal,
        theirs.eps,
    )


@pytest.mark.parametrize("name", FORMATS)
def test_fields_rebuild_the_code_and_the_smallest_numbers_are_numbers(name):
    each = FORMATS[name]
    codes = all_codes(name) if each.bits <= 19 else np.arange(0, 2**32, 65_521)
    sign, exponent, fraction = each.fields(codes)
    rebuilt = (sign << each.exponent_bits | exponent) << each.mantissa_bits | fraction
    assert np.array_equal(rebuilt, codes)
    for value in (each.smallest_subnormal, each.smallest_normal, 1 + each.eps, each.max):
        assert each.decode(each.encode(value)) == value
    assert each.decode(each.encode(1)) == 1


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "fp32"])
def test_spacing_is_the_distance_to_the_next_number(name):
    numbers = FORMATS[name].decode(all_codes(name))
    numbers = np.unique(numbers[np.isfinite(numbers) & (numbers >= 0)])
    assert np.array_equal(FORMATS[name].spacing(numbers[:-1]), np.diff(numbers))
    assert np.array_equal(FORMATS[name].spacing(-numbers[:-1]), np.diff(numbers))
    between = (numbers[:-1] + numbers[1:]) / 2
    assert np.array_equal(FORMATS[name].spacing(between), np.diff(numbers))
    assert np.isnan(FORMATS[name].spacing([np.nan, np.inf, np.nextafter(numbers[-1], np.inf)])).all()


def test_no_input_warns():
    signalling = np.array([0x7F800001], np.uint32).view(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in FORMATS:
            FORMATS[name].encode(signalling)
            FORMATS[name].encode([5e-324, 1e308, -1e308, *SPECIAL])
            FORMATS[name].spacing([0.0, 5e-324, 1e308, *SPECIAL])


def test_fp32_ties_encode_as_in_numpy():
    below = np.random.default_rng(3).integers(0, 0x7F7FFFFF, 500_000).astype(np.uint32)
    lower, upper = below.view(np.float32).astype(np.float64), (below + np.uint32(1)).view(np.float32).astype(np.float64)
    middle = (lower + upper) / 2
    values = np.concatenate([middle, np.nextafter(middle, 0), np.nextafter(middle, np.inf)])
    assert np.array_equal(FORMATS["fp32"].encode(values), values.astype(np.float32).view(np.uint32))


def test_saturation_stops_at_the_maximum():
    values = [1e38 * 10, -1e38 * 10, np.inf, -np.inf]
    for each in FORMATS.values():
        assert each.decode(each.encode(values, saturate=True)).tolist() == [each.max, -each.max] * 2
        assert np.isnan(each.decode(each.encode(np.nan, saturate=True))) == (each.specials != "none")


def test_kinds_of_all_halves():
    kinds, counts = np.unique(FORMATS["fp16"].kind(all_codes("fp16")), return_counts=True)
    assert dict(zip(kinds.tolist(), counts.tolist())) == {
        "NaN": 2046,
        "infinity": 2,
        "normal": 61440,
        "subnormal": 2046,
        "zero": 2,
    }
    assert FORMATS["fp8_e4m3fn"].kind([0x7E, 0x7F]).tolist() == ["normal", "NaN"]


def test_shapes_and_kinds_of_input():
    half = FORMATS["fp16"]
    assert half.decode(0x3C00) == 1.0 and isinstance(half.decode(0x3C00), float)
    assert half.decode(np.zeros((2, 0, 3), np.uint8)).shape == (2, 0, 3)
    assert half.encode([[1, 2], [3, 4]]).shape == (2, 2)
    assert half.encode(torch.tensor([1.0, 2.0])).tolist() == [0x3C00, 0x4000]
    assert half.decode(torch.tensor([1.0], dtype=torch.float16).view(torch.uint16)).tolist() == [1.0]
    assert half.decode([]).shape == half.encode([]).shape == (0,)
    weight = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.bfloat16))
    assert half.encode(weight).tolist() == [0x3C00]
    assert half.encode(True) == half.encode(np.float16(1)) == 0x3C00


@pytest.mark.parametrize(
    "call, error, named",
    [
        (lambda half: half.decode(0x10000), ValueError, "codes are integers from 0 to 0xffff, not 65536"),
        (lambda half: half.decode([0, -1]), ValueError, "use .view(torch.uint16)"),
        (lambda half: half.decode(1.0), TypeError, "codes are integers"),
        (lambda half: half.spacing("1.5"), TypeError, "takes real numbers"),
        (lambda half: half.encode("1.5"), TypeError, "takes real numbers, not <U3 such as ['1.5']"),
        (lambda half: half.encode(1j), TypeError, "takes real numbers"),
        (lambda half: FORMATS["fp17"], KeyError, "there are fp32, tf32, bf16, fp16, fp8_e5m2"),
    ],
)
def test_bad_input_is_refused_by_an_error_that_names_what_is_allowed(call, error, named):
    with pytest.raises(error) as refusal:
        call(FORMATS["fp16"])
    assert named in str(refusal.value)
    assert ("torch.uint16" in str(refusal.value)) == ("uint16" in named)


def test_formats_cannot_be_changed():
    with pytest.raises(AttributeError):
        FORMATS["fp16"].exponent_bits = 8
    assert FloatFormat("fp16", 5, 10) == FORMATS["fp16"]
