"""Checks of notebook 11, formats beyond fp16."""

import math

import torch

from helpers.check.replies import says
from helpers.formats import FORMATS


@says
def block_exponent(answer):
    """`answer(amax, name)` is the smallest exponent of an E8M0 scale that cuts nothing of a block off."""
    e4m3, fp4 = "fp8_e4m3fn", "fp4_e2m1fn"
    cases = [(448.0, e4m3), (449.0, e4m3), (512.0, e4m3), (0.01, e4m3), (5.0, fp4), (0.4, fp4), (0.0, fp4)]
    for amax, name in [*cases, (1e-40, e4m3), (1e39, fp4)]:
        given, largest = answer(amax, name), FORMATS[name].max
        right = min(max(math.ceil(math.log2(amax / largest)), -127), 127) if amax else -127
        if given == right:
            continue
        case = f"for amax {amax:g} in {name} the exponent is {right}, and you say {given}"
        if not -127 <= given <= 127:
            return f"{case}. E8M0 holds -127 to 127"
        if given < right:
            return f"{case}: {amax:g} / 2^{given} is {amax / 2.0**given:g}, past {largest:g}"
        return f"{case}. A smaller scale keeps more of the small numbers"
    return None


@says
def to_e5m2(answer):
    """`answer(x, noise)` rounds fp16 to E5M2 numbers stochastically, adding `noise` to the bits."""
    x = torch.tensor([1.0, 1.1, -1.1, 1.24, 3e-6, -40000.0, 57344.0, 65504.0, -60000.0, 0.0], dtype=torch.float16)
    for number in (0, 100, 255):
        noise = torch.full(x.shape, number, dtype=torch.int16)
        given = answer(x.clone(), noise)
        right = ((x.clamp(-57344, 57344).view(torch.int16) + noise) & -256).view(torch.float16)
        if getattr(given, "dtype", None) != torch.float16 or given.shape != x.shape:
            return f"you return {getattr(given, 'dtype', type(given).__name__)}; asked for is fp16 of the shape of x"
        for value, mine, yours in zip(x.tolist(), right.tolist(), given.tolist()):
            case = f"{value:g} with noise {number} becomes {mine:g}, and yours {yours:g}"
            if math.isinf(yours):
                return f"{case}. Clamp to 57344 first"
            if mine != yours:
                same = yours == torch.tensor(value).to(torch.float8_e5m2).item()
                return f"{case}" + (". That is rounding to nearest" if same else "")
    return None


@says
def next_scale(answer):
    """`answer(history, scale, margin)` is the next scale for E4M3; the old one if the history is of no use."""
    bad = [[1.0, math.inf], [math.nan, 2.0], [2.0, math.nan], [0.0, 0.0]]
    for history, margin in [([1.0, 7.0, 2.0], 0), ([0.5], 0), ([3.0, 0.0], 2), *((each, 0) for each in bad)]:
        right = 7.0 if history in bad else 448 / 2**margin / max(history)
        given = float(answer(list(history), 7.0, margin))
        if math.isclose(given, right, rel_tol=1e-6):
            continue
        case = f"history {history}, old scale 7, margin {margin}: {right:g}, and you say {given:g}"
        if history in bad:
            return f"{case}. Keep the old scale"
        return f"{case}. That is the way back: 448 over the amax" if given * right == 1 else case
    return None
