"""halfbits.formats against ml_dtypes, NumPy, torch and torchao.

Every code is decoded; a million numbers and every tie are encoded.
"""

import subprocess
import sys
import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
from packaging.version import Version

from halfbits.formats import (
    BLOCK_FORMATS,
    E8M0,
    FORMATS,
    MXFP4,
    MXFP6,
    MXFP8,
    NVFP4,
    BlockFormat,
    Blocks,
    FloatFormat,
)

NUMPY = {
    "fp32": np.float32,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "fp8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "fp6_e3m2fn": ml_dtypes.float6_e3m2fn,
    "fp6_e2m3fn": ml_dtypes.float6_e2m3fn,
    "fp4_e2m1fn": ml_dtypes.float4_e2m1fn,
}
TORCH = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e5m2fnuz": torch.float8_e5m2fnuz,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
}
assert set(NUMPY) | {"tf32"} == set(FORMATS), "name in NUMPY the type to compare a new format with"
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
    1 + 2**-8 + 2**-40 is 1. From a float32 that was rounded to odd, the second rounding is right
    (Boldo and Melquiond, IEEE Transactions on Computers 57, 2008). NumPy's own float16 needs no
    such help.
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
    return codes & (2 ** FORMATS[name].bits - 1)


def ties_and_their_neighbours(name):
    """The midpoints of neighbours, each with the float64s around it.

    The last is that of the maximum and what would come next.
    """
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
    theirs = codes.to(integers).view(TORCH[name]).to(torch.float64).numpy()
    if FORMATS[name].specials == "fnuz":
        theirs = np.where(np.isnan(theirs), -np.nan, theirs)  # torch drops the sign of this NaN
    assert same(FORMATS[name].decode(codes), theirs)


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
    """ml_dtypes converts one Python float without float32, so nothing is rounded to odd here."""
    values = ties_and_their_neighbours(name)
    theirs = np.array([NUMPY[name](value) for value in values.tolist()]).view(np.uint8)
    theirs = theirs & (2 ** FORMATS[name].bits - 1)
    assert np.count_nonzero(FORMATS[name].encode(values) != theirs) == 0


def test_tf32_is_fp32_rounded_to_ten_bits_of_fraction():
    rng = np.random.default_rng(1)
    values = rng.integers(0, 2**32, 1_000_000, dtype=np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    bits = values.view(np.uint32).astype(np.int64)
    half_less_one, last_kept = 2**12 - 1, bits >> 13 & 1  # 13 of 23 fraction bits go; ties to even
    assert np.array_equal(FORMATS["tf32"].encode(values), bits + half_less_one + last_kept >> 13)
    # The last would be a tie again in float32.
    near_tie = 1 + 2.0**-11 + np.array([-(2.0**-40), 0, 2.0**-40])
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
    if name == "fp8_e5m2fnuz" and Version(torch.__version__) < Version("2.15"):
        pytest.skip("finfo of older versions halves the eps of E5M2FNUZ")
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
    beyond = [np.nan, np.inf, np.nextafter(numbers[-1], np.inf)]
    assert np.isnan(FORMATS[name].spacing(beyond)).all()


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
    lower, upper = (
        below.view(np.float32).astype(np.float64),
        (below + np.uint32(1)).view(np.float32).astype(np.float64),
    )
    middle = (lower + upper) / 2
    values = np.concatenate([middle, np.nextafter(middle, 0), np.nextafter(middle, np.inf)])
    assert np.array_equal(FORMATS["fp32"].encode(values), values.astype(np.float32).view(np.uint32))


def test_saturation_stops_at_the_maximum():
    values = [1e39, -1e39, np.inf, -np.inf]
    for each in FORMATS.values():
        assert each.decode(each.encode(values, saturate=True)).tolist() == [each.max, -each.max] * 2
        has_nan = each.specials != "none"
        assert np.isnan(each.decode(each.encode(np.nan, saturate=True))) == has_nan


def test_what_has_no_zero_below_0_or_no_nan_has_another_code_for_it():
    fnuz = FORMATS["fp8_e4m3fnuz"]
    tie_to_0 = -fnuz.smallest_subnormal / 2
    assert fnuz.encode([-0.0, tie_to_0, 1.01 * tie_to_0]).tolist() == [0x00, 0x00, 0x81]
    assert fnuz.encode([np.nan, -np.nan, np.inf, -300.0]).tolist() == [0x80] * 4
    assert fnuz.encode([np.nan, np.inf, -300.0], saturate=True).tolist() == [0x80, 0x7F, 0xFF]
    assert fnuz.kind([0x80, 0x00, 0x81]).tolist() == ["NaN", "zero", "subnormal"]
    assert (fnuz.bias, fnuz.max, FORMATS["fp8_e5m2fnuz"].bias) == (8, 240.0, 16)
    for name in ("fp6_e3m2fn", "fp6_e2m3fn"):
        assert FORMATS[name].encode([np.nan, -np.nan]).tolist() == [0x20, 0x00]
        assert FORMATS[name].encode([np.inf, -np.inf]).tolist() == [0x1F, 0x3F]


@pytest.mark.parametrize("name", [name for name in TORCH if FORMATS[name].bits == 8])
def test_torch_casts_as_the_docstring_of_encode_says(name):
    values = torch.from_numpy(ties_and_their_neighbours(name)).float()
    values = torch.cat([values, torch.tensor([500.0, 1e30, *SPECIAL])])
    theirs = values.to(TORCH[name])
    saturates = name == "fp8_e4m3fn" and Version(torch.__version__) >= Version("2.13")
    ours = FORMATS[name].decode(FORMATS[name].encode(values, saturate=saturates))
    assert np.array_equal(ours, theirs.double().numpy(), equal_nan=True)
    if saturates:
        assert theirs[values == torch.inf].tolist() == [448.0]


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
    one = torch.tensor([1.0], dtype=torch.float16)
    assert half.decode(one.view(torch.uint16)).tolist() == [1.0]
    assert half.decode([]).shape == (0,)
    assert half.encode([]).shape == (0,)
    weight = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.bfloat16))
    assert half.encode(weight).tolist() == [0x3C00]
    assert half.encode(True) == 0x3C00
    assert half.encode(np.float16(1)) == 0x3C00
    assert half.decode(torch.tensor([[0x3C00]], dtype=torch.int64)).tolist() == [[1.0]]


@pytest.mark.parametrize("name", [*TORCH, "fp32"])
def test_a_tensor_of_the_format_itself_gives_its_bits(name):
    each = FORMATS[name]
    dtype = TORCH.get(name, torch.float32)
    integers = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}[each.bits]
    codes = torch.arange(2 ** min(each.bits, 16), dtype=torch.int64).reshape(-1, 2).to(integers)
    values = codes.view(dtype).t()
    assert same(each.decode(values), each.decode(codes.t()))
    assert np.array_equal(each.kind(values), each.kind(codes.t()))
    for ours, expected in zip(each.fields(values), each.fields(codes.t())):
        assert np.array_equal(ours, expected)


def test_a_weight_gives_its_bits():
    weight = torch.nn.Parameter(torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    assert FORMATS["bf16"].decode(weight).tolist() == [1.5, -2.0]


def test_formats_have_other_names_too():
    others = {
        "fp32": ["float32", "float", torch.float32],
        "tf32": ["TF32", "tensorfloat32"],
        "bf16": ["bfloat16", "torch.bfloat16", torch.bfloat16],
        "fp16": ["float16", "half", "FP16", torch.half, np.dtype("float16")],
        "fp8_e5m2": ["e5m2", "float8_e5m2", torch.float8_e5m2],
        "fp8_e4m3fn": ["e4m3", "e4m3fn", "fp8_e4m3", "float8_e4m3fn", "E4M3", torch.float8_e4m3fn],
        "fp8_e5m2fnuz": ["e5m2fnuz", torch.float8_e5m2fnuz],
        "fp8_e4m3fnuz": ["e4m3fnuz", torch.float8_e4m3fnuz],
        "fp6_e3m2fn": ["e3m2", "fp6_e3m2", "float6_e3m2fn"],
        "fp6_e2m3fn": ["e2m3", "fp6_e2m3", "float6_e2m3fn"],
        "fp4_e2m1fn": ["e2m1", "fp4", "fp4_e2m1", "float4_e2m1fn"],
    }
    assert list(FORMATS) == list(others)
    assert len(FORMATS) == len(others)
    for name, keys in others.items():
        assert FORMATS[name].name == name
        for key in keys:
            assert FORMATS[key].name == name
            assert key in FORMATS
            assert FORMATS.get(key) is not None
    for key in ["", "fp17", "torch", torch.float64, torch.int8, 16, None]:
        assert key not in FORMATS
        assert FORMATS.get(key) is None
    sizes = [each.bits for each in FORMATS.values() if each.name != "tf32"]
    assert sizes == sorted(sizes, reverse=True)


def test_formats_need_no_torch():
    program = "import sys; sys.modules['torch'] = None; import halfbits.formats as formats; "
    program += "print(formats.FORMATS['fp16'].encode(1.0), formats.MXFP4.round([3.0] * 32)[0])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "15360 3.0\n", done.stderr


@pytest.mark.parametrize(
    "call, error, named",
    [
        (
            lambda half: half.decode(0x10000),
            ValueError,
            "codes are integers from 0 to 0xffff, not 65536",
        ),
        (lambda half: half.decode([0, -1]), ValueError, "use .view(torch.uint16)"),
        (lambda half: half.decode(1.0), TypeError, "codes are integers"),
        (lambda half: half.spacing("1.5"), TypeError, "takes real numbers"),
        (lambda half: half.encode("1.5"), TypeError, "takes real numbers, not <U3 such as ['1.5']"),
        (lambda half: half.encode(1j), TypeError, "takes real numbers"),
        (
            lambda half: half.decode(torch.ones(2)),
            TypeError,
            "not values of torch.float32: encode them first, or take their own format",
        ),
        (lambda half: half.fields(torch.ones(2).bfloat16()), TypeError, "values of torch.bfloat16"),
        (lambda half: half.kind(torch.ones(2).double()), TypeError, "values of torch.float64"),
        (lambda half: FORMATS["tf32"].decode(torch.ones(2)), TypeError, "values of torch.float32"),
        (lambda half: FORMATS["fp17"], KeyError, "there are fp32, tf32, bf16, fp16, fp8_e5m2"),
        (lambda half: FORMATS[torch.float64], KeyError, "no format torch.float64: there are fp32"),
        (lambda half: BLOCK_FORMATS["mx"], KeyError, "no format 'mx': there are mxfp8_e5m2, mxfp8"),
        (lambda half: E8M0.decode(256), ValueError, "integers from 0 to 0xff, not 256"),
        (lambda half: E8M0.decode(torch.ones(2)), TypeError, "values of torch.float32"),
        (lambda half: E8M0.encode("1"), TypeError, "takes real numbers"),
        (lambda half: MXFP8.encode(np.ones((2, 33))), ValueError, "32 numbers along the last dim"),
        (lambda half: NVFP4.round(torch.ones(32, 8)), ValueError, "not the shape (32, 8): pad it"),
        (lambda half: MXFP8.encode(1.0), ValueError, "not the shape ()"),
        (lambda half: NVFP4.encode(["1"] * 16), TypeError, "nvfp4 takes real numbers"),
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
    with pytest.raises(TypeError):
        FORMATS["fp17"] = FORMATS["fp16"]
    assert FloatFormat("fp16", 5, 10) == FORMATS["fp16"]
    assert BlockFormat("mxfp4", FORMATS["fp4"], 32) == MXFP4


def test_e8m0_is_that_of_ml_dtypes():
    codes = np.arange(256, dtype=np.uint8)
    theirs = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    assert same(E8M0.decode(codes), theirs)
    assert same(E8M0.decode(torch.from_numpy(codes).view(torch.float8_e8m0fnu)), theirs)
    assert np.array_equal(E8M0.encode(theirs), codes)
    rng = np.random.default_rng(4)
    values = np.exp2(rng.uniform(-126, 128, 1_000_000)).astype(np.float32)
    ties = 1.5 * theirs[1:255]
    near_ties = np.concatenate([np.nextafter(ties, 0), ties, np.nextafter(ties, np.inf)])
    below = [0.0, -0.0, -1.0, np.inf, np.nan, 2.0**-140, 2.0**-128, 2.0**-127]
    values = np.concatenate([values, near_ties.astype(np.float32), np.array(below, np.float32)])
    with np.errstate(invalid="ignore"):
        theirs = values.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    assert np.array_equal(E8M0.encode(values), theirs)
    assert E8M0.encode(near_ties).tolist() == [*range(1, 255), *range(2, 256), *range(2, 256)]


def test_e8m0_rounds_to_the_nearest_where_ml_dtypes_and_torch_round_up():
    values = np.array([1.25, 1.49], np.float32) * np.float32(2**-127)
    assert E8M0.encode(values).tolist() == [0, 0]
    assert values.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8).tolist() == [1, 1]
    assert torch.from_numpy(values).to(torch.float8_e8m0fnu).view(torch.uint8).tolist() == [1, 1]


def blocks_of(block_size):
    """float32 rows of blocks: random, tiny, huge, and close to what rounds otherwise."""
    rng = np.random.default_rng(5)
    width = 4 * block_size
    normal = rng.standard_normal((500, width))
    scaled = normal * np.exp2(rng.uniform(-140, 120, (500, 1)))
    mixed = normal * np.exp2(rng.uniform(-20, 20, (500, width)))
    bits = rng.integers(0, 2**31, (500, width), dtype=np.uint32).view(np.float32)
    bits = np.where(np.isfinite(bits), bits, np.float32(0)).astype(np.float64)
    # Ties of every element format, below an amax next to each power of two.
    ties = rng.choice(ties_and_their_neighbours("e4m3"), (500, width))
    ties = np.concatenate([ties, rng.choice(ties_and_their_neighbours("e2m1"), (500, width))])
    ties[:, ::block_size] = 2.0 ** rng.integers(-3, 9, (1000, 4))
    ties[::2, ::block_size] = np.nextafter(ties[::2, ::block_size].astype(np.float32), 0)
    zeros = np.where(rng.random((100, width)) < 0.9, 0.0, normal[:100])
    zeros = np.copysign(zeros, rng.standard_normal(zeros.shape))
    zeros[:50, :block_size] = -0.0
    largest = np.full((1, width), np.finfo(np.float32).max)
    rows = [normal, scaled, mixed, bits, ties, zeros, largest, -largest]
    return np.concatenate(rows).astype(np.float32)


def to_mx(values, name):
    """The scales and codes of torchao."""
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")

    element = {
        "mxfp8_e4m3": torch.float8_e4m3fn,
        "mxfp8_e5m2": torch.float8_e5m2,
        "mxfp6_e2m3": "fp6_e2m3",
        "mxfp6_e3m2": "fp6_e3m2",
        "mxfp4": torch.float4_e2m1fn_x2,
    }[name]
    scales, codes = mx_tensor.to_mx(torch.from_numpy(values), element, 32)
    decoded = mx_tensor.to_dtype(codes, scales, element, 32, torch.float32)
    if name == "mxfp4":
        codes = mx_tensor.unpack_uint4(codes)
    return scales.view(torch.uint8).numpy(), codes.view(torch.uint8).numpy(), decoded.numpy()


MX = [name for name in BLOCK_FORMATS if name != "nvfp4"]


@pytest.mark.parametrize("name", MX)
@pytest.mark.filterwarnings("ignore")
def test_mx_is_that_of_torchao(name):
    values = blocks_of(32)
    blocks = BLOCK_FORMATS[name].encode(values)
    scales, codes, decoded = to_mx(values, name)
    assert np.array_equal(blocks.scales, scales)
    # With the smallest scale, 2^-127, torchao divides by 2^-126, as the docstring says.
    smallest = np.repeat(scales == 0, 32, axis=-1)
    assert 0 < smallest.mean() < 0.2
    assert np.array_equal(blocks.codes[~smallest], codes[~smallest])
    assert same(BLOCK_FORMATS[name].decode(blocks)[~smallest], decoded[~smallest])
    halves = BLOCK_FORMATS[name].elements.encode(values[smallest] * 2.0**126, saturate=True)
    assert np.array_equal(halves, codes[smallest])
    wholes = BLOCK_FORMATS[name].elements.encode(values[smallest] * 2.0**127, saturate=True)
    assert np.array_equal(blocks.codes[smallest], wholes)


@pytest.mark.parametrize("name", MX)
@pytest.mark.filterwarnings("ignore")
def test_mx_takes_inf_and_nan_as_torchao_does(name):
    values = blocks_of(32)[:50]
    values[:20, 3] = np.inf
    values[10:20, 4] = -np.inf
    values[20:40, 5] = np.nan
    values[30:40, 6] = np.inf
    ours = BLOCK_FORMATS[name].encode(values)
    scales, codes, decoded = to_mx(values, name)
    assert np.array_equal(ours.scales, scales)
    assert (scales[20:40, 0] == 255).all()
    assert np.array_equal(ours.codes[:20], codes[:20])
    rounded = BLOCK_FORMATS[name].decode(ours)
    assert np.array_equal(rounded, decoded, equal_nan=True)
    assert (rounded[:20, 3] == np.inf).all()
    assert np.isnan(rounded[20:40, :32]).all()
    assert np.isfinite(rounded[:, 32:]).all()


@pytest.mark.parametrize("name", MX)
def test_mx_elements_and_scales_are_those_of_ml_dtypes(name):
    form = BLOCK_FORMATS[name]
    values = blocks_of(32).astype(np.float64).reshape(-1, 32)
    values = values[np.abs(values).max(-1) > 2.0**-100]
    amax = np.abs(values).max(-1, keepdims=True)
    emax = np.floor(np.log2(form.elements.max))
    power = np.floor(np.log2(amax.astype(np.longdouble))).astype(np.float64)
    wanted = np.exp2(power - emax)
    blocks = form.encode(values)
    assert np.array_equal(blocks.scales, wanted.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8))
    elements = np.clip(values / wanted, -form.elements.max, form.elements.max)
    assert np.array_equal(blocks.codes, encoded_by_others(form.elements.name, elements))


def next_to_ties_of_nvfp4(values):
    """`values` whose elements, but each block's largest, lie on or next to a tie between codes."""
    rng = np.random.default_rng(8)
    _, scales, tensor_scale = NVFP4.encode(values)
    scales = np.repeat(FORMATS["e4m3"].decode(scales) * tensor_scale, 16, axis=-1)
    ties = rng.choice([-2.5, -0.25, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], values.shape)
    near = (ties * scales).astype(np.float32)
    neighbours = [np.nextafter(near, np.float32(0)), near, np.nextafter(near, 2 * near)]
    near = np.choose(rng.integers(0, 3, near.shape), neighbours)
    amax = np.abs(values).reshape(-1, 16).max(-1, keepdims=True)
    is_largest = (np.abs(values).reshape(-1, 16) == amax).reshape(values.shape)
    return np.where(is_largest | (np.abs(near) > 5.2 * scales), values, near)


def next_to_ties_of_scales(largest):
    """Blocks whose scales lie on or next to a tie between codes of E4M3."""
    ties = ties_and_their_neighbours("e4m3")
    ties = ties[(ties > 2.0**-6) & (ties < 440)]
    amax = (ties * 6 * (largest / 2688)).astype(np.float32)
    amax = np.concatenate([amax, np.nextafter(amax, 0), np.nextafter(amax, np.inf), [largest]])
    return (amax[:, None] * FORMATS["e2m1"].decode(range(16)) / 6).astype(np.float32)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("largest", [2688 * 2.0**-119, 1e-30, 0.013, 1.0, 1.37, 2688.0, 1e4, 3e38])
def test_nvfp4_is_that_of_torchao(largest):
    nvfp4_tensor = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")

    rows = blocks_of(16).astype(np.float64)
    rows = rows / np.maximum(np.abs(rows).max(-1, keepdims=True), 2.0**-140)
    rng = np.random.default_rng(6)
    steps = np.repeat(np.exp2(rng.uniform(-16, 0, (len(rows), 4))), 16, axis=-1)
    stepped = (rows * steps * largest).astype(np.float32)
    plain = (rows * largest).astype(np.float32)
    ties = next_to_ties_of_nvfp4(stepped)
    for values in (plain, stepped, ties, next_to_ties_of_scales(largest)):
        tensor = torch.from_numpy(values)
        tensor_scale = nvfp4_tensor.per_tensor_amax_to_scale(tensor.abs().max())
        theirs = nvfp4_tensor.NVFP4Tensor.to_nvfp4(tensor, per_tensor_scale=tensor_scale)
        ours = NVFP4.encode(values)
        assert ours.tensor_scale == tensor_scale.item()
        assert np.array_equal(ours.scales, theirs.scale.view(torch.uint8).numpy())
        codes = nvfp4_tensor.unpack_uint4(theirs.qdata.view(torch.uint8))
        assert np.array_equal(ours.codes, codes.numpy())
        assert len(np.unique(ours.codes)) == 16
        assert same(NVFP4.decode(ours), theirs.dequantize(torch.float32).numpy())
        from_torchao = Blocks(codes, theirs.scale, theirs.per_tensor_scale)
        assert same(NVFP4.decode(from_torchao), NVFP4.decode(ours))


@pytest.mark.filterwarnings("ignore")
def test_nvfp4_of_zeros_and_tiny_numbers_of_inf_and_nan():
    nvfp4_tensor = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")

    zeros = np.zeros((2, 32), np.float32)
    assert same(NVFP4.round(-zeros), -zeros)
    tensor = torch.from_numpy(zeros)
    theirs = nvfp4_tensor.NVFP4Tensor.to_nvfp4(tensor, per_tensor_scale=tensor.abs().max() / 2688)
    assert theirs.dequantize(torch.float32).isnan().all()
    tiny = np.linspace(-1, 1, 64, dtype=np.float32) * np.float32(2688 * 2.0**-122)
    blocks = NVFP4.encode(tiny)
    assert blocks.tensor_scale == 2.0**-121
    assert np.abs(NVFP4.decode(blocks) - tiny).max() < 0.2 * tiny.max()
    for special in (np.inf, -np.inf, np.nan):
        values = np.ones((2, 32), np.float32)
        values[0, 3] = special
        assert np.isnan(NVFP4.round(values)).all()
        tensor = torch.from_numpy(values)
        scale = nvfp4_tensor.per_tensor_amax_to_scale(tensor.abs().max())
        theirs = nvfp4_tensor.NVFP4Tensor.to_nvfp4(tensor, per_tensor_scale=scale)
        assert theirs.dequantize(torch.float32).isnan().all()
    values = np.ones((1, 32), np.float32)
    values[0, :16] = 0
    assert NVFP4.encode(values).scales.tolist() == [[FORMATS["e4m3"].encode(2.0**-6), 0x7E]]
    assert same(NVFP4.round(values), values)


def test_blocks_have_the_shape_of_the_values_and_round_what_they_hold_to_itself():
    for form in BLOCK_FORMATS.values():
        values = np.random.default_rng(7).standard_normal((3, 2, 96))
        blocks = form.encode(values)
        assert blocks.codes.shape == (3, 2, 96)
        assert blocks.scales.shape == (3, 2, 96 // form.block_size)
        assert blocks.codes.dtype == np.uint8
        assert blocks.scales.dtype == np.uint8
        rounded = form.round(values)
        assert rounded.dtype == np.float32
        assert 0 < np.abs(rounded - values).max() < np.abs(values).max() / 6
        if form != NVFP4:
            assert same(form.round(rounded), rounded)
        assert form.round(np.zeros((0, 96))).shape == (0, 96)
        assert form.round(np.zeros((3, 0))).shape == (3, 0)
        weight = torch.nn.Parameter(torch.from_numpy(values).bfloat16())
        from_tensor = form.round(weight)
        assert from_tensor.dtype == torch.float32
        assert not from_tensor.requires_grad
        assert np.array_equal(from_tensor.numpy(), form.round(weight.detach().float().numpy()))
    bits = [form.bits_per_number for form in (MXFP8, MXFP6, MXFP4, NVFP4)]
    assert bits == [8.25, 6.25, 4.25, 4.5]


def test_no_block_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for form in BLOCK_FORMATS.values():
            for value in (*SPECIAL, 1e300, 5e-324, 1e-40, 3e38):
                form.round(np.full(32, value))
                form.round(np.where(np.arange(32) == 1, value, 1.0))


def test_block_formats_have_other_names_too():
    assert BLOCK_FORMATS["mxfp8"] is MXFP8
    assert BLOCK_FORMATS["MXFP6"] is MXFP6
    assert BLOCK_FORMATS["mxfp4_e2m1"] is MXFP4
    assert (MXFP8.elements.name, MXFP6.elements.name) == ("fp8_e4m3fn", "fp6_e2m3fn")
    names = ["mxfp8_e5m2", "mxfp8_e4m3", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "nvfp4"]
    assert list(BLOCK_FORMATS) == names
