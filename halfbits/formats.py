"""Binary floating-point formats from 32 bits down to 4, and formats whose blocks share a scale.

`FORMATS` and `BLOCK_FORMATS` hold them by name: the value of every code, the code of every value.
Numbers come as NumPy arrays, PyTorch tensors (which are copied to the CPU), lists or plain numbers.

Layouts: IEEE 754-2019 (fp32, fp16); bf16 and TF32 are fp32 with a shorter fraction (NVIDIA A100
whitepaper, 2020); OCP 8-bit Floating Point Specification 1.0 (E5M2, E4M3); FNUZ: Noune et al.,
arXiv:2206.02915; OCP Microscaling Formats Specification 1.0 (FP6, FP4, E8M0, MX); NVFP4: NVIDIA,
arXiv:2509.25149.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class FloatFormat:
    """A format: one sign bit, then the exponent, then the fraction (IEEE's trailing significand).

    A normal number is (-1)^sign * 2^(exponent - bias) * (1 + fraction / 2^mantissa_bits). With
    exponent 0 it is subnormal: (-1)^sign * 2^(1 - bias) * fraction / 2^mantissa_bits.

    specials: "ieee", the highest exponent holds the infinities (fraction 0) and NaNs; "nan", only
        the codes that are all ones after the sign are NaN, and there is no infinity; "fnuz", the
        code of -0 is the only NaN, there is no infinity, and the bias is larger by one; "none",
        every code is a number.

    Examples
    --------
    >>> half = FORMATS["fp16"]
    >>> half.decode([0x3C00, 0x7BFF]).tolist(), hex(half.encode(0.1)), half.max
    ([1.0, 65504.0], '0x2e66', 65504.0)
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    specials: str = "ieee"

    @property
    def bits(self) -> int:
        """The length of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """What is subtracted from the exponent field."""
        return 2 ** (self.exponent_bits - 1) - (0 if self.specials == "fnuz" else 1)

    @property
    def eps(self) -> float:
        """The distance from 1 to the next number."""
        return 2.0**-self.mantissa_bits

    @property
    def smallest_normal(self) -> float:
        """The smallest number with all its bits of fraction."""
        return 2.0 ** (1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest number above 0."""
        return self.smallest_normal * self.eps

    @property
    def max(self) -> float:
        """The largest finite number."""
        return float(self.decode(self._past_max - 1))

    @property
    def _past_max(self) -> int:
        """The code after that of `max`: inf; NaN if there is no inf; none if there is neither."""
        after_sign = 2 ** (self.exponent_bits + self.mantissa_bits)
        first = {"ieee": after_sign - 2**self.mantissa_bits, "nan": after_sign - 1}
        return first.get(self.specials, after_sign)

    def fields(self, codes: ArrayLike) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The fields (sign, exponent, fraction) of `codes`, each int64 of the same shape.

        Takes what `decode` takes, and raises what it raises.

        >>> [field.tolist() for field in FORMATS["fp16"].fields([0x3C00, 0xC001])]
        [[0, 1], [15, 16], [0, 1]]
        """
        codes = _as_codes(codes, self)
        sign = codes >> (self.exponent_bits + self.mantissa_bits)
        exponent = (codes >> self.mantissa_bits) & (2**self.exponent_bits - 1)
        fraction = codes & (2**self.mantissa_bits - 1)
        return sign, exponent, fraction

    def kind(self, codes: ArrayLike) -> np.ndarray:
        """What each code is: "zero", "subnormal", "normal", "infinity" or "NaN", as strings.

        Takes what `decode` takes, and raises what it raises.

        >>> FORMATS["fp8_e4m3fn"].kind([0x00, 0x01, 0x7E, 0x7F]).tolist()
        ['zero', 'subnormal', 'normal', 'NaN']
        """
        _, exponent, fraction = self.fields(codes)
        values = self.decode(codes)
        subnormal = (exponent == 0) & (fraction > 0)
        cases = [np.isnan(values), np.isinf(values), values == 0, subnormal]
        return np.select(cases, ["NaN", "infinity", "zero", "subnormal"], "normal")[()]

    def decode(self, codes: ArrayLike) -> np.ndarray:
        """The values of `codes` as float64 of the same shape. All are exact.

        Takes integers of any shape, or a tensor whose dtype is this format and whose bits are then
        the codes. Raises TypeError for any other dtype, ValueError for a code the format has not.

        >>> FORMATS["fp8_e4m3fn"].decode([0x38, 0x7E, 0x7F]).tolist()
        [1.0, 448.0, nan]
        """
        sign, exponent, fraction = self.fields(codes)
        significand = fraction + ((exponent > 0) << self.mantissa_bits)
        power = np.maximum(exponent, 1) - self.bias - self.mantissa_bits
        magnitude = np.ldexp(significand.astype(np.float64), power)
        unsigned = (exponent << self.mantissa_bits) + fraction
        past_max = np.inf if self.specials == "ieee" else np.nan
        cases = [unsigned > self._past_max, unsigned == self._past_max]
        magnitude = np.select(cases, [np.nan, past_max], magnitude)
        if self.specials == "fnuz":
            magnitude = np.where(sign & (unsigned == 0), np.nan, magnitude)
        return np.where(sign, -magnitude, magnitude)[()]

    def encode(self, values: ArrayLike, saturate: bool = False) -> np.ndarray:
        """The codes nearest to `values`; of two codes as near, the even one.

        Takes real numbers of any shape, as float64. Returns unsigned integers of the same shape, as
        narrow as the format allows. What rounds past the maximum, inf included, becomes inf, or NaN
        in a format without inf; the maximum if `saturate`, or in a format without either. NaN
        stays NaN. FP6 and FP4 have none: it becomes a zero of opposite sign, as in ml_dtypes. FNUZ
        has no -0: it becomes 0. Raises TypeError for values that are not real numbers.

        PyTorch's own cast on the CPU, `tensor.to(torch.float8_e4m3fn)`, does what `saturate` does
        since 2.13: 500 and inf become 448. (Up to 2.12 they became NaN.) Its casts to float8_e5m2 (past the
        maximum inf) and to the FNUZ formats (NaN) do what the default does.

        >>> e4m3 = FORMATS["fp8_e4m3fn"]
        >>> e4m3.decode(e4m3.encode([464, 465])), e4m3.decode(e4m3.encode(465, saturate=True))
        (array([448.,  nan]), np.float64(448.0))
        """
        values = _as_float64(values, self.name)
        negative = np.signbit(values)
        nan = np.isnan(values)
        magnitude = np.fmin(np.abs(values), 2 * self.max)  # what is past the maximum stays past it
        _, power = np.frexp(np.maximum(magnitude, self.smallest_normal))
        exponent = power.astype(np.int64) - 1 + self.bias  # as frexp's fraction is 0.5 to 1
        significand = np.rint(np.ldexp(magnitude, self.bias + self.mantissa_bits - exponent))
        # The implicit bit adds 1 to the exponent, and so does a fraction that was rounded up to 1.
        codes = ((exponent - 1) << self.mantissa_bits) + significand.astype(np.int64)
        stays_finite = saturate or self.specials == "none"
        codes = np.clip(codes, 0, self._past_max - (1 if stays_finite else 0))
        if self.specials == "none":
            codes = np.where(nan, 0, codes)
            negative = negative ^ nan
        else:
            quiet_bit = 2 ** (self.mantissa_bits - 1) if self.specials == "ieee" else 0
            codes = np.where(nan, self._past_max + quiet_bit, codes)
        if self.specials == "fnuz":
            negative = negative & (codes > 0)
        codes = codes | (negative.astype(np.int64) << (self.exponent_bits + self.mantissa_bits))
        return codes.astype(np.min_scalar_type(2**self.bits - 1))[()]

    def spacing(self, values: ArrayLike) -> np.ndarray:
        """The distance between neighbours: from |value|, rounded down, to the next larger number.

        float64 of the shape of `values`. NaN where the format has no finite number as large.
        Takes what `encode` takes, and raises what it raises.

        >>> FORMATS["fp16"].spacing([1, 2048, 1e5]).tolist()
        [0.0009765625, 2.0, nan]
        """
        magnitude = np.abs(_as_float64(values, self.name))
        _, power = np.frexp(np.maximum(magnitude, self.smallest_normal))
        return np.where(magnitude <= self.max, np.ldexp(self.eps, power - 1), np.nan)[()]


@dataclass(frozen=True)
class E8M0Format:
    """The scales of MX blocks: 8 bits of exponent, no sign and no fraction.

    The code e stands for 2^(e - 127), and 255 for NaN. There is no 0. (Microscaling Formats 5.4.1.)

    >>> E8M0.decode([0, 127, 254, 255]).tolist()
    [5.877471754111438e-39, 1.0, 1.7014118346046923e+38, nan]
    """

    name: str = "fp8_e8m0fnu"
    bits: int = 8

    def decode(self, codes: ArrayLike) -> np.ndarray:
        """The values of `codes` as float64 of the same shape. All are exact.

        Takes integers of any shape, or a tensor of torch.float8_e8m0fnu. Raises what
        `FloatFormat.decode` raises.
        """
        codes = _as_codes(codes, self)
        return np.where(codes == 255, np.nan, np.ldexp(1.0, codes - 127))[()]

    def encode(self, values: ArrayLike) -> np.ndarray:
        """The codes of the nearest powers of two; of two as near, the larger.

        uint8 of the same shape. NaN for 0, for what is negative and for what rounds past 2^127, as
        in ml_dtypes. (PyTorch's own cast makes 0 the code 0. Both round up what is between 2^-127
        and 1.5 * 2^-127.) Raises TypeError for values that are not real numbers.

        >>> E8M0.encode([1, 1.4, 1.5, 0]).tolist()
        [127, 127, 128, 255]
        """
        values = _as_float64(values, self.name)
        fraction, power = np.frexp(values)  # value = fraction * 2^power with 0.5 <= fraction < 1
        codes = np.clip(power + 126 + (fraction >= 0.75), 0, 255)
        return np.where((values > 0) & np.isfinite(values), codes, 255).astype(np.uint8)[()]


E8M0 = E8M0Format()


class Blocks(NamedTuple):
    """What `BlockFormat.encode` returns.

    codes: uint8 of the shape of the values, one code a byte.
    scales: the codes of the scales, uint8 of that shape with one for each block in the last place.
    tensor_scale: one float32 for all; 1 in the MX formats.
    """

    codes: np.ndarray
    scales: np.ndarray
    tensor_scale: np.float32 = np.float32(1)


@dataclass(frozen=True)
class BlockFormat:
    """A format in which each `block_size` numbers along the last dimension share a scale.

    A number is its element times the block's scale times the tensor's scale.

    With scales in E8M0, the MX rule: the scale is 2^(floor(log2(amax)) - emax), where amax is the
    largest magnitude in the block and 2^emax the largest power of two among the elements. Elements
    saturate. (Microscaling Formats 6.3; torchao's ScaleCalculationMode.FLOOR.)

    - A block of zeros has the smallest scale, 2^-127, and decodes to zeros.
    - inf counts as 2^128. It saturates, and its product with the scale is inf again in float32.
    - A block with a NaN has the scale NaN, so all of it decodes to NaN, whatever its elements are.

    With scales in E4M3, NVFP4. Its arithmetic is in float32, in the order of torchao's
    `nvfp4_quantize`, and equal to it to the bit:

    1. tensor_scale = amax of the tensor / (6 * 448)
    2. scale = E4M3 of (amax of the block / 6 / tensor_scale), at least 2^-6, at most 448
    3. element = E2M1 of (number * (1 / tensor_scale / scale)), saturated

    - A block of zeros has the scale 2^-6, and decodes to zeros.
    - A NaN or an inf anywhere makes the tensor's scale NaN or inf, and all numbers decode to NaN.
    - tensor_scale is at least 2^-121, so that no reciprocal overflows. torchao 0.18 has no such
      limit: it makes a tensor of zeros NaN.

    torchao 0.18 also differs in MX blocks whose scale is 2^-127 (amax below 2^(emax - 126)): it
    divides them by 2^-126, and so decodes them to half of what they were.

    >>> MXFP4.round(np.linspace(0, 31, 32))[[1, 9, 10, 31]].tolist(), NVFP4.bits_per_number
    ([0.0, 8.0, 8.0, 24.0], 4.5)
    """

    name: str
    elements: FloatFormat
    block_size: int
    scale_format: FloatFormat | E8M0Format = E8M0

    @property
    def bits_per_number(self) -> float:
        """Bits of an element and its share of the block's scale; the tensor's scale is left out."""
        return self.elements.bits + self.scale_format.bits / self.block_size

    def encode(self, values: ArrayLike) -> Blocks:
        """The codes of `values`, which are rounded to float32 first, and the codes of the scales.

        Raises TypeError for values that are not real numbers, ValueError where the last dimension
        is not a multiple of `block_size`.

        >>> codes, scales, _ = MXFP8.encode(np.full(64, 3.0))
        >>> codes[0], scales.tolist()  # 384 * 2^-7
        (np.uint8(124), [120, 120])
        """
        with np.errstate(all="ignore"):
            values = _as_float64(values, self.name).astype(np.float32)
            if values.ndim == 0 or values.shape[-1] % self.block_size:
                raise ValueError(
                    f"{self.name} takes blocks of {self.block_size} numbers along the last "
                    f"dimension, not the shape {values.shape}: pad it to a multiple with zeros"
                )
            count = values.shape[-1] // self.block_size
            numbers = values.reshape(*values.shape[:-1], count, self.block_size)
            amax = np.abs(numbers).max(-1, initial=0)
            if self.scale_format == E8M0:
                scales = self._power_of_two_scales(amax)
                tensor_scale = np.float32(1)
                scaled = numbers / E8M0.decode(scales)[..., None]
            else:
                largest = np.float32(self.elements.max * self.scale_format.max)
                tensor_scale = np.maximum(amax.max(initial=0) / largest, np.float32(2**-121))
                wanted = amax / np.float32(self.elements.max) / tensor_scale
                wanted = np.clip(wanted, self.scale_format.smallest_normal, self.scale_format.max)
                scales = self.scale_format.encode(wanted)
                rounded = self.scale_format.decode(scales).astype(np.float32)
                scaled = numbers * (np.float32(1) / tensor_scale / rounded)[..., None]
            codes = self.elements.encode(scaled, saturate=True)
            return Blocks(codes.reshape(values.shape), scales, tensor_scale)

    def _power_of_two_scales(self, amax: np.ndarray) -> np.ndarray:
        _, power = np.frexp(amax)
        floor_of_log2 = np.select([amax == 0, np.isinf(amax)], [-127, 128], power - 1)
        emax = math.frexp(self.elements.max)[1] - 1
        codes = np.clip(floor_of_log2 - emax + 127, 0, 254)
        return np.where(np.isnan(amax), 255, codes).astype(np.uint8)

    def decode(self, blocks: Blocks) -> np.ndarray:
        """The numbers that `blocks` stand for, as float32 of the shape of their codes.

        `blocks` may hold tensors of 8-bit floats too, such as torchao's `qdata` and `scale`. Raises
        what `FloatFormat.decode` raises.

        >>> MXFP8.decode(Blocks(np.full(32, 0x7C), np.array([120]))).max()
        np.float32(3.0)
        """
        codes, scales, tensor_scale = blocks
        elements = self.elements.decode(codes).astype(np.float32)
        with np.errstate(all="ignore"):
            scales = self.scale_format.decode(scales).astype(np.float32) * np.float32(tensor_scale)
            numbers = elements.reshape(*scales.shape, self.block_size) * scales[..., None]
        return numbers.reshape(elements.shape)

    def round(self, values: ArrayLike) -> np.ndarray:
        """`decode(encode(values))`, in float32.

        For a tensor, this is a tensor on the same device, without gradients.

        >>> MXFP6.round(np.full(32, 0.7)).max()
        np.float32(0.6875)
        """
        rounded = self.decode(self.encode(values))
        if hasattr(values, "detach"):
            import torch

            return torch.from_numpy(rounded).to(values.device)
        return rounded


def _as_codes(codes: ArrayLike, form: FloatFormat | E8M0Format) -> np.ndarray:
    """`codes` as an int64 array; the bits of a tensor whose dtype is `form`."""
    if hasattr(codes, "detach"):
        codes = codes.detach().cpu()
        own_dtype = form.name.replace("bf16", "bfloat16").replace("fp", "float")
        if str(codes.dtype) == f"torch.{own_dtype}":
            import torch

            codes = codes.view({8: torch.uint8, 16: torch.uint16, 32: torch.uint32}[form.bits])
        elif codes.is_floating_point():
            raise TypeError(
                f"{form.name} decodes integer codes, not values of {codes.dtype}: "
                "encode them first, or take their own format from FORMATS"
            )
        codes = codes.numpy()
    codes = np.asarray(codes)
    last = 2**form.bits - 1
    allowed = f"{form.name} codes are integers from 0 to {last:#x}"
    if codes.size and codes.dtype.kind not in "iu":
        raise TypeError(f"{allowed}, not {codes.flat[0]!r}")
    wrong = codes[(codes < 0) | (codes > last)]
    if wrong.size:
        hint = ": use .view(torch.uint16), as torch.int16 has a sign" if wrong[0] < 0 else ""
        raise ValueError(f"{allowed}, not {wrong[0]}{hint}")
    return codes.astype(np.int64)


def _as_float64(values: ArrayLike, name: str) -> np.ndarray:
    if hasattr(values, "detach"):  # a tensor, perhaps of a dtype that NumPy has not
        values = values.detach().cpu().double()
    values = np.asarray(values)
    if values.dtype.kind not in "biuf":
        raise TypeError(f"{name} takes real numbers, not {values.dtype} such as {values.flat[:1]}")
    with np.errstate(all="ignore"):  # signalling NaNs, and what only a longdouble can hold
        return values.astype(np.float64)


class _Named(Mapping):
    """Formats by name; they are also found by other names, in any case, and by a torch.dtype."""

    def __init__(self, formats: list, other_names: dict[str, str]) -> None:
        self._formats = {form.name: form for form in formats}
        self._names = {name: name for name in self._formats}
        for name, others in other_names.items():
            self._names |= dict.fromkeys(others.split(), name)

    def __getitem__(self, key):
        name = str(key).removeprefix("torch.").lower()
        if name not in self._names:
            raise KeyError(f"no format {key!r}: there are {', '.join(self)}")
        return self._formats[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._formats)

    def __len__(self) -> int:
        return len(self._formats)


FORMATS: Mapping[str, FloatFormat] = _Named(
    [
        FloatFormat("fp32", 8, 23),
        FloatFormat("tf32", 8, 10),
        FloatFormat("bf16", 8, 7),
        FloatFormat("fp16", 5, 10),
        FloatFormat("fp8_e5m2", 5, 2),
        FloatFormat("fp8_e4m3fn", 4, 3, "nan"),
        FloatFormat("fp8_e5m2fnuz", 5, 2, "fnuz"),
        FloatFormat("fp8_e4m3fnuz", 4, 3, "fnuz"),
        FloatFormat("fp6_e3m2fn", 3, 2, "none"),
        FloatFormat("fp6_e2m3fn", 2, 3, "none"),
        FloatFormat("fp4_e2m1fn", 2, 1, "none"),
    ],
    {
        "fp32": "float32 float single",
        "tf32": "tensorfloat32",
        "bf16": "bfloat16",
        "fp16": "float16 half",
        "fp8_e5m2": "float8_e5m2 e5m2",
        "fp8_e4m3fn": "float8_e4m3fn fp8_e4m3 e4m3fn e4m3",
        "fp8_e5m2fnuz": "float8_e5m2fnuz e5m2fnuz",
        "fp8_e4m3fnuz": "float8_e4m3fnuz e4m3fnuz",
        "fp6_e3m2fn": "float6_e3m2fn fp6_e3m2 e3m2fn e3m2",
        "fp6_e2m3fn": "float6_e2m3fn fp6_e2m3 e2m3fn e2m3",
        "fp4_e2m1fn": "float4_e2m1fn fp4_e2m1 fp4 e2m1fn e2m1",
    },
)

BLOCK_FORMATS: Mapping[str, BlockFormat] = _Named(
    [
        BlockFormat("mxfp8_e5m2", FORMATS["e5m2"], 32),
        BlockFormat("mxfp8_e4m3", FORMATS["e4m3"], 32),
        BlockFormat("mxfp6_e3m2", FORMATS["e3m2"], 32),
        BlockFormat("mxfp6_e2m3", FORMATS["e2m3"], 32),
        BlockFormat("mxfp4", FORMATS["e2m1"], 32),
        BlockFormat("nvfp4", FORMATS["e2m1"], 16, FORMATS["e4m3"]),
    ],
    {"mxfp8_e4m3": "mxfp8", "mxfp6_e2m3": "mxfp6", "mxfp4": "mxfp4_e2m1", "nvfp4": "nvfp4_e2m1"},
)
MXFP8 = BLOCK_FORMATS["mxfp8_e4m3"]
MXFP6 = BLOCK_FORMATS["mxfp6_e2m3"]
MXFP4 = BLOCK_FORMATS["mxfp4"]
NVFP4 = BLOCK_FORMATS["nvfp4"]
