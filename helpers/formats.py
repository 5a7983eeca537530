"""Binary floating-point formats from 32 bits down to 4: the value of every code, and the code of every value.

Layouts: IEEE 754-2019 (fp32, fp16); OCP 8-bit Floating Point Specification 1.0 (FP8); OCP Microscaling Formats
Specification 1.0 (FP4); bf16 and TF32 are fp32 with a shorter fraction (NVIDIA A100 whitepaper, 2020).
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class FloatFormat:
    """A format: one sign bit, then the exponent, then the fraction (IEEE's trailing significand).

    A normal number is (-1)^sign * 2^(exponent - bias) * (1 + fraction / 2^mantissa_bits). With exponent 0 it is
    subnormal: (-1)^sign * 2^(1 - bias) * fraction / 2^mantissa_bits.

    specials: "ieee", the highest exponent holds the infinities (fraction 0) and NaNs; "nan", only the codes that are
        all ones after the sign are NaN, and there is no infinity; "none", every code is a number.

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
    def bits(self):
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self):
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def eps(self):
        """The distance from 1 to the next number."""
        return 2.0**-self.mantissa_bits

    @property
    def smallest_normal(self):
        return 2.0 ** (1 - self.bias)

    @property
    def smallest_subnormal(self):
        """The smallest number above 0."""
        return self.smallest_normal * self.eps

    @property
    def max(self):
        """The largest finite number."""
        return float(self.decode(self._infinity - 1))

    @property
    def _infinity(self):
        """The code of inf (of NaN in formats without inf; past the last code in formats without either)."""
        ones = 2 ** (self.exponent_bits + self.mantissa_bits) - 1
        return {"ieee": ones - 2**self.mantissa_bits + 1, "nan": ones, "none": ones + 1}[self.specials]

    def fields(self, codes):
        """(sign, exponent, fraction) of `codes`, an integer or an array of them, as int64 of the same shape.

        Raises TypeError for codes that are not integers, ValueError for one that the format has not.
        """
        codes, last = np.asarray(codes), 2**self.bits - 1
        if codes.size and codes.dtype.kind not in "iu":
            raise TypeError(f"{self.name} codes are integers from 0 to {last:#x}, not {codes.flat[0]!r}")
        wrong = codes[(codes < 0) | (codes > last)]
        if wrong.size:
            hint = ". A torch.int16 view has a sign: use .view(torch.uint16)" if wrong[0] < 0 else ""
            raise ValueError(f"{self.name} codes are integers from 0 to {last:#x}, not {wrong[0]}{hint}")
        codes = codes.astype(np.int64)
        exponent = codes >> self.mantissa_bits & (2**self.exponent_bits - 1)
        return codes >> (self.exponent_bits + self.mantissa_bits), exponent, codes & (2**self.mantissa_bits - 1)

    def kind(self, codes):
        """What each of `codes` is: "zero", "subnormal", "normal", "infinity" or "NaN", in an array of strings."""
        _, exponent, fraction = self.fields(codes)
        values, subnormal = self.decode(codes), (exponent == 0) & (fraction > 0)
        cases = [np.isnan(values), np.isinf(values), values == 0, subnormal]
        return np.select(cases, ["NaN", "infinity", "zero", "subnormal"], "normal")[()]

    def decode(self, codes):
        """The values of `codes`, an integer or an array of them, as float64 of the same shape. All are exact.

        Raises TypeError for codes that are not integers, ValueError for one that the format has not.
        """
        sign, exponent, fraction = self.fields(codes)
        significand = fraction + ((exponent > 0) << self.mantissa_bits)
        power = np.maximum(exponent, 1) - self.bias - self.mantissa_bits
        magnitude = np.ldexp(significand.astype(np.float64), power)
        unsigned = (exponent << self.mantissa_bits) + fraction
        infinity = np.inf if self.specials == "ieee" else np.nan
        magnitude = np.select([unsigned > self._infinity, unsigned == self._infinity], [np.nan, infinity], magnitude)
        return np.where(sign, -magnitude, magnitude)[()]

    def encode(self, values, saturate=False):
        """The codes nearest to `values`, real numbers of any shape, taken as float64; of two as near, the even one.

        Returns unsigned integers of the same shape, as narrow as the format allows. What rounds past the maximum
        becomes inf, or NaN in a format without inf; the maximum if `saturate`, or in a format without either.
        FP4 has no code for NaN, which becomes a zero of opposite sign, as in ml_dtypes. Raises TypeError for values
        that are not real numbers.
        """
        values = self._as_float64(values)
        negative, nan = np.signbit(values), np.isnan(values)
        magnitude = np.fmin(np.abs(values), 2 * self.max)  # what is past the maximum stays past it
        _, power = np.frexp(np.maximum(magnitude, self.smallest_normal))  # magnitude = x * 2^power with 0.5 <= x < 1
        exponent = power.astype(np.int64) - 1 + self.bias
        significand = np.rint(np.ldexp(magnitude, self.bias + self.mantissa_bits - exponent)).astype(np.int64)
        # The implicit bit adds 1 to the exponent field, and so does a fraction that was rounded up to 1.
        codes = ((exponent - 1) << self.mantissa_bits) + significand
        codes = np.clip(codes, 0, self._infinity - 1 if saturate or self.specials == "none" else self._infinity)
        if self.specials == "none":
            codes, negative = np.where(nan, 0, codes), negative ^ nan
        else:
            codes = np.where(nan, self._infinity | 2**self.mantissa_bits >> 1, codes)
        codes |= negative.astype(np.int64) << (self.exponent_bits + self.mantissa_bits)
        return codes.astype(np.min_scalar_type(2**self.bits - 1))[()]

    def spacing(self, values):
        """The distance between neighbouring numbers at `values`: from |value|, rounded down, to the next larger.

        float64 of the shape of `values`. NaN where the format has no finite number as large. Raises as `encode` does.
        """
        magnitude = np.abs(self._as_float64(values))
        _, power = np.frexp(np.maximum(magnitude, self.smallest_normal))
        return np.where(magnitude <= self.max, np.ldexp(self.eps, power - 1), np.nan)[()]

    def _as_float64(self, values):
        if hasattr(values, "detach"):  # a tensor, perhaps on a GPU, perhaps of a dtype that NumPy has not
            values = values.detach().cpu().double()
        values = np.asarray(values)
        if values.dtype.kind not in "biuf":
            raise TypeError(f"{self.name} takes real numbers, not {values.dtype} such as {values.flat[:1]}")
        with np.errstate(all="ignore"):  # signalling NaNs, and what only a longdouble can hold
            return values.astype(np.float64)


class _Formats(dict):
    def __missing__(self, name):
        raise KeyError(f"no format {name!r}: there are {', '.join(self)}")


_ALL = [
    FloatFormat("fp32", 8, 23),
    FloatFormat("tf32", 8, 10),
    FloatFormat("bf16", 8, 7),
    FloatFormat("fp16", 5, 10),
    FloatFormat("fp8_e5m2", 5, 2),
    FloatFormat("fp8_e4m3fn", 4, 3, "nan"),
    FloatFormat("fp4_e2m1fn", 2, 1, "none"),
]
FORMATS = _Formats((each.name, each) for each in _ALL)
