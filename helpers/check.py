"""Checks of a reader's answers. Each prints at once what is wrong, or that the answer is right; none ever raises."""

import functools
import math
import reprlib
import weakref

import numpy as np
import torch
from IPython.display import display
from torch.utils.data import DistributedSampler

from helpers.bitview import BitView
from helpers.formats import FORMATS
from helpers.measure import kept_for_backward


class _Wrong(Exception):
    """The whole reply to a call that gave no answer."""


def _asked(answer):
    """`answer`, with words for the calls that raise or return nothing; the first such call means an untouched stub."""
    calls = []

    def ask(*arguments):
        calls.append(arguments)
        shown = ", ".join(map(reprlib.repr, arguments))
        try:
            given = answer(*arguments)
        except (Exception, SystemExit) as error:
            raise _Wrong(
                f"Not right yet: called with {shown}, your code raised {type(error).__name__}: {error}"
            ) from None
        if given is not None and given is not ...:
            return given
        if len(calls) == 1:
            raise _Wrong("Not yet: your function returns None. Replace the dots by your code, with a return.")
        raise _Wrong(f"Not right yet: called with {shown}, your function returns None.")

    return ask


def _says(check):
    """Make a check print its reply, and never raise: it returns None for a right answer, else what is wrong with it.

    That is a text, or a text and BitViews to draw below it: (text, view, ...).
    """

    @functools.wraps(check)
    def reply(answer):
        try:
            wrong = check(_asked(answer))
        except _Wrong as words:
            print(words)
            return
        except Exception as error:  # the answer is of a kind that the check cannot even compare
            wrong = f"your function returns something unexpected ({type(error).__name__}: {error})"
        wrong, *views = wrong if isinstance(wrong, tuple) else (wrong,)
        print(f"Not right yet: {wrong}" if wrong else "Right.")
        for view in views:
            display(view)

    return reply


def _same(a, b):
    """Whether two numbers are equal, NaN and the sign of zero included."""
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


_DECODED = [  # codes that tell faults apart, and what to think of when one is decoded wrongly
    (0x3C00, "Its exponent field is 15, its fraction 0."),
    (0x3E00, "The fraction counts in 1024ths, on top of the implicit 1."),
    (0xC000, "The highest bit is the sign."),
    (0x0001, "With exponent field 0 there is no implicit 1, and the power is 2^(1 - 15)."),
    (0x7C00, "Exponent field 31 with fraction 0 is infinity."),
    (0x7E00, "Exponent field 31 with any other fraction is NaN."),
    (0x8000, "Zero has a sign too."),
]


@_says
def decode_fp16(answer):
    """01: `answer(code)` is the value, a float, of a 16-bit code."""
    values = FORMATS["fp16"].decode(range(65_536)).tolist()
    for code, why in [*_DECODED, *((code, "") for code in range(65_536))]:
        given, right = answer(code), values[code]
        if _same(given, right):
            continue
        if code == 0x3C00 and given > 0 and math.frexp(given)[0] == 0.5:
            return f"your exponent bias is {15 - math.log2(given):.0f}; for fp16 it is 15"
        return f"for {code:#06x} you say {given!r}; it is {right!r}. {why}", BitView(code, "fp16")
    return None


_ENCODED = [  # values that tell faults apart
    (1.0, "2^0 needs the exponent field 15, and the 1 in front is not stored."),
    (-2.0, "A negative number has the highest bit set."),
    (0.0, "All bits of zero are 0. Take care that it has no leading 1 to be found."),
    (1.0009, "The nearest is the next number above 1: round, do not cut off."),
    (2049.0, "2048 and 2050 are equally near. Of two such numbers, the one with the even fraction wins."),
    (2051.0, "2050 and 2052 are equally near. Of two such numbers, the one with the even fraction wins."),
    (1 + 2**-11 + 2**-30, "It is nearer to the next number above 1. Round once, not first to float32."),
    (2047.9, "It rounds up to 2048: the fraction is full, and the exponent grows by 1."),
    (2.0**-24, "Below 2^-14 numbers are subnormal: the spacing stays 2^-24."),
    (2.0**-26, "It is nearer to 0 than to 2^-24."),
    (65519.0, "It is nearer to 65504 than to 65536, which would be the next number."),
    (65520.0, "From the middle between 65504 and 65536 on, numbers become infinity, exponent field 31."),
    (-math.inf, "Infinity has exponent field 31 and fraction 0."),
    (-0.0, "Zero has a sign too: math.copysign(1, value) tells."),
]


@_says
def encode_fp16(answer):
    """01: `answer(value)` is the 16-bit code nearest to a float; of two as near, the even one. NaN: any NaN's code."""
    half, rng = FORMATS["fp16"], np.random.default_rng(0)
    finite = half.decode(rng.integers(0, 0x7BFF, 1000))
    ties = finite + half.spacing(finite) / 2
    random = rng.choice([-1, 1], 1000) * 2 ** rng.uniform(-27, 17, 1000)
    cases = _ENCODED + [(value, "") for value in [*ties.tolist(), *random.tolist(), math.nan]]
    for (value, why), right in zip(cases, half.encode([value for value, _ in cases]).tolist()):
        given = answer(value)
        given = given.item() if hasattr(given, "item") else given
        if not isinstance(given, int) or not 0 <= given <= 0xFFFF:
            return f"for {value!r} you give {given!r}. A code is an integer from 0 to 0xffff."
        if given == right or (math.isnan(value) and half.kind(given) == "NaN"):
            continue
        yours, nearest = BitView(given, "fp16"), BitView(value, "fp16")
        return f"for {value!r} you give {yours.value!r}; right is {nearest.value!r}. {why}", yours, nearest
    return None


@_says
def limits(answer):
    """01: `answer(exponent_bits, mantissa_bits)` is (max, smallest normal, smallest subnormal, eps), IEEE style."""
    for name in ("fp16", "bf16", "fp32", "fp8_e5m2"):
        each = FORMATS[name]
        given = answer(each.exponent_bits, each.mantissa_bits)
        if len(given) != 4:
            return (
                f"you return {len(given)} values; asked for are four: (max, smallest normal, smallest subnormal, eps)"
            )
        for what, right, value in zip(
            ("max", "smallest normal", "smallest subnormal", "eps"),
            (each.max, each.smallest_normal, each.smallest_subnormal, each.eps),
            given,
        ):
            if value != right:
                times = f", which is {value / right:.6g} times as much" if value else ""
                return f"{what} of {name}: you say {value!r}{times}. It is {right!r}"
    return None


@_says
def smallest_step(answer):
    """02: `answer(weight, name)` is the smallest power of two that moves `weight` when added to it in a format."""
    for name, code in [("fp16", 0x3C00), ("fp16", 0x3C01), ("fp16", 0x3C02), ("bf16", 0x3F81), ("fp16", 0x3801)]:
        each = FORMATS[name]
        weight = float(each.decode(code))
        given, half = answer(weight, name), each.spacing(weight) / 2
        right = half if code % 2 else 2 * half
        if given == right:
            continue
        if math.frexp(given)[0] != 0.5:
            return f"{given} is not a power of two"
        if each.encode(weight + given) == code:
            return f"{weight} + {given} is still {weight} in {name}", BitView(weight + given, name)
        return f"{given} moves {weight} in {name}, but so does {right}", BitView(weight + right, name)
    return None


@_says
def kahan_sum(answer):
    """02: `answer(terms)` is the sum of a 1-d fp16 tensor, an fp16 scalar. How it was found cannot be told."""
    ones = torch.ones(4096, dtype=torch.float16)
    given = answer(ones)
    if getattr(given, "dtype", None) != torch.float16:
        return f"the total is {getattr(given, 'dtype', type(given).__name__)}. Keep it in torch.float16."
    if given == 2048:
        return "4,096 ones give 2048: the total stalls. The correction is missing, or has the wrong sign."
    if given != 4096:
        return f"4,096 ones give {given.item()}; their sum is 4096"
    for terms, total in [([1000.0, 1.0], 1001), ([1.0, 1000.0, 2.0], 1003)]:
        given = answer(torch.tensor(terms, dtype=torch.float16))
        if given != total:
            return f"{terms} give {given.item()}, not {total}"
    terms = torch.rand(3000, generator=torch.Generator().manual_seed(0)).half()
    exact, given = terms.double().sum().item(), answer(terms)
    if given.dtype != torch.float16 or given.dim():
        return f"the total of 3,000 numbers is {given.dtype} of shape {tuple(given.shape)}, not a torch.float16 scalar"
    if abs(given.item() - exact) > FORMATS["fp16"].spacing(exact):
        return f"3,000 random numbers give {given.item()}; their sum is {exact:.2f}, and the spacing there 1"
    return None


@_says
def rms(answer):
    """02: `answer(x)` is the root mean square of an fp16 tensor of any shape, as an fp16 scalar."""
    cases = [
        [3.0, 4.0],
        [300.0] * 5,
        [65504.0, 65504.0],
        [1e-4] * 3,
        [6e-8, 6e-8],
        [0.0, 0.0],
        [[-2.0, 0.0], [0.0, 0.0]],
        [1.0] * 70_000,
    ]
    for case in cases:
        x = torch.tensor(case, dtype=torch.float16)
        right = x.double().square().mean().sqrt().item()
        given = answer(x.clone())
        of = f"of {case[:3]}{' ...' if len(case) > 3 else ''}"
        if getattr(given, "dtype", None) != torch.float16:
            return f"the result {of} is {getattr(given, 'dtype', type(given).__name__)}, and should be torch.float16"
        if given.dim():
            return f"the result {of} has the shape {tuple(given.shape)}; it should be a scalar"
        if given.isnan() and not right:
            return f"the rms {of} is nan: 0/0. It is 0"
        if not abs(given.item() - right) <= 2 * FORMATS["fp16"].spacing(right):
            what = {math.inf: "a square, or their sum, overflowed", 0.0: "the squares underflowed"}.get(
                given.item(), ""
            )
            return f"the rms {of} is {given.item():.6g}; it should be {right:.6g}. {what}"
    return None


@_says
def next_state(answer):
    """03: `answer(scale, tracker, found_inf, growth_interval)` is the next (scale, tracker), as GradScaler's."""
    rng = np.random.default_rng(0)
    cases = [(65536.0, 5, True, 2000), (65536.0, 5, False, 2000), (65536.0, 1999, False, 2000), (0.5, 0, True, 3)]
    cases += [
        (2.0 ** int(power), int(rng.integers(interval)), bool(inf), int(interval))
        for power, interval, inf in zip(rng.integers(-9, 20, 500), rng.integers(1, 9, 500), rng.integers(0, 2, 500))
    ]
    for scale, tracker, found_inf, interval in cases:
        right = torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32)
        torch._amp_update_scale_(*right, torch.tensor(float(found_inf)), 2.0, 0.5, interval)
        given, right = answer(scale, tracker, found_inf, interval), (right[0].item(), right[1].item())
        if not isinstance(given, tuple) or len(given) != 2:
            return f"you return {given!r}; asked for are two values, (scale, tracker)"
        if given != right:
            why = "an infinity was found" if found_inf else f"this is clean step {tracker + 1} of {interval}"
            return f"from scale {scale}, tracker {tracker}, you go to {given}; {why}, so it is {right}"
    return None


@_says
def largest_scale(answer):
    """03: `answer(gradients)` is the largest power of two that keeps a float32 tensor finite in fp16."""
    for values in ([1.0, -2.0], [1e-6, 1e-9], [-0.3, 0.1], [65519.0], [65520.0], [4095.0] * 99, [3e-20], [1e30]):
        gradients = torch.tensor(values)
        given = float(answer(gradients.clone()))
        fits = lambda scale, gradients=gradients: (gradients.double() * scale).half().isfinite().all().item()
        if given <= 0 or math.frexp(given)[0] != 0.5:
            return f"for {values[:3]} you give {given}, which is not a power of two"
        if not fits(given):
            return f"{values[:3]} times your {given} is {(gradients[:3].double() * given).half().tolist()} in fp16"
        if fits(2 * given):
            return f"{values[:3]} times your {given} is finite, but so it is times {2 * given}"
    return None


@_says
def paste(answer):
    """04: `answer(x, mask, y)` is a copy of x, in its dtype, with the elements of y where mask is true."""
    mask = torch.tensor([True, False, True])
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    for into, source in [(a, b) for a in dtypes for b in dtypes]:
        x, y = torch.full((3,), 5.0, dtype=into), torch.tensor([1.0, 2.0, 3.0], dtype=source)
        for enabled in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                given = answer(x, mask, y)
            if not (x == 5).all():
                return "x itself was changed. Write into x.clone()."
            if given.dtype != into:
                return f"for {source} into {into} your result is {given.dtype}; it should keep the dtype of x"
            if given.tolist() != [1, 5, 3]:
                return f"with the mask {mask.tolist()} and y {y.tolist()}, fives become {given.tolist()}, not [1, 5, 3]"
    return None


@_says
def rms_norm(answer):
    """04: `answer(x, weight, eps)` is x / sqrt(mean(x^2) + eps) * weight over the last dimension, safe in 16 bits."""
    generator = torch.Generator().manual_seed(0)
    for dtype, size in [(torch.float32, 1), (torch.float16, 1), (torch.float16, 1000), (torch.bfloat16, 1)]:
        x = (size * torch.randn(4, 64, generator=generator)).to(dtype)
        weight = torch.rand(64, generator=generator)
        right = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * weight.double()
        with torch.autocast("cpu", torch.bfloat16):
            given = answer(x, weight, 1e-6)
        if given.dtype != dtype:
            return f"for x in {dtype} you return {given.dtype}; it should be the dtype of x"
        if not given.isfinite().all():
            return f"for x in {dtype} with elements near {size} the result is not finite: the squares overflow"
        off = (given.double() - right).abs().max().item()
        if off > 4 * torch.finfo(dtype).eps:
            return f"for x in {dtype} you are off by {off:.2g}; computed in float32 it is {torch.finfo(dtype).eps:.1g}"
    return None


def _fp16_training(infinite=False):
    """A small layer with old gradients, its optimizer and scaler, the dtypes of its outputs (a list), and a batch."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model, images, dtypes = torch.nn.Linear(4, 1), torch.randn(8, 4), []
    model.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    images[0] *= math.inf if infinite else 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", 1024.0)
    return model, optimizer, scaler, dtypes, images, torch.tensor([[0.0], [1.0]] * 4)


def _reference_fp16_step(parts, divide=True, zero_grad=True, max_norm=math.inf):
    """The weight after one step on the batch in so many parts, and the gradients' norm."""
    model, optimizer, scaler, _, images, labels = _fp16_training()
    if zero_grad:
        optimizer.zero_grad()
    for x, y in zip(images.chunk(parts), labels.chunk(parts)):
        with torch.autocast("cpu", torch.float16):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(x), y) / (parts if divide else 1)
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    return model.weight.detach(), norm


def _fault_of_fp16_step(step, parts, max_norm=math.inf):
    """What is wrong with the weights after `step(model, optimizer, scaler, images, labels)`, or None."""
    model, optimizer, scaler, dtypes, images, labels = _fp16_training()
    before = model.weight.detach().clone()
    step(model, optimizer, scaler, images, labels)
    if set(dtypes) != {torch.float16}:
        return f"the layer's output is {dtypes[0] if dtypes else 'missing'}. Call the model under autocast, in dtype."
    if scaler._get_growth_tracker() != 1:
        return f"scaler.update() was called {scaler._get_growth_tracker()} times; once at the end is right"
    if torch.equal(model.weight, before):
        return "the weights did not move. Call scaler.step(optimizer)."
    if not torch.allclose(model.weight, _reference_fp16_step(parts, max_norm=max_norm)[0]):
        for fault, words in [
            (
                {"divide": False},
                f"the gradient is {parts} times that of the whole batch. Divide each loss by len(parts).",
            ),
            ({"zero_grad": False}, "gradients of the step before are still in it. Call optimizer.zero_grad() first."),
            ({"max_norm": math.inf}, "the weights moved as without clipping. Clip between unscale_ and step."),
        ]:
            if torch.allclose(model.weight, _reference_fp16_step(parts, **({"max_norm": max_norm} | fault))[0]):
                return words
        return "the weights are not those of one step. Is the loss a mean, and the scale taken off by scaler.step?"
    model, optimizer, scaler, _, images, labels = _fp16_training(infinite=True)
    step(model, optimizer, scaler, images, labels)
    if not torch.equal(model.weight, before):
        return "with an infinite gradient the weights moved. Step by scaler.step(optimizer), which skips such a step."
    return None


@_says
def accumulated_step(answer):
    """05: `answer(model, optimizer, scaler, parts, device_type, dtype)` does one fp16 step over a batch in parts."""
    for parts in (4, 2):

        def step(model, optimizer, scaler, images, labels, parts=parts):
            pairs = list(zip(images.chunk(parts), labels.chunk(parts)))
            answer(model, optimizer, scaler, pairs, "cpu", torch.float16)

        if fault := _fault_of_fp16_step(step, parts):
            return fault
    return None


@_says
def clipped_step(answer):
    """05: `answer(model, optimizer, scaler, images, labels, device_type, dtype, max_norm)` returns the norm."""
    norms = []

    def step(model, optimizer, scaler, images, labels):
        norms.append(float(answer(model, optimizer, scaler, images, labels, "cpu", torch.float16, 0.1)))

    fault, right = _fault_of_fp16_step(step, 1, max_norm=0.1), _reference_fp16_step(1)[1]
    if norms[0] > 100 * right:
        return f"you return the norm {norms[0]:.4g} of the scaled gradients. Call scaler.unscale_(optimizer) before."
    if not fault and not math.isclose(norms[0], right, rel_tol=1e-3):
        return f"you return {norms[0]:.4g}; the norm before clipping is {right:.4g}"
    return fault


class _Views(torch.nn.Module):
    """Keeps one tensor for two ops, a view of it for a third, and of another tensor nothing but a view."""

    def forward(self, x):
        return x.sin() * x.cos() + x[:, 2:].cos().sum() + (x + 1)[:, :3].cos().sum()


@_says
def kept_bytes(answer):
    """06: `answer(model, images)` is the bytes that forward keeps for backward, the model's own tensors left out."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), _Views()
    convolutions = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3)
    for name, network, shape in [
        ("two linear layers and ops that share tensors", torch.nn.Sequential(*linear), (16, 8)),
        ("convolution, batch norm, ReLU, convolution", torch.nn.Sequential(*convolutions), (2, 3, 9, 9)),
    ]:
        images, seen = torch.randn(shape), []
        right = sum(kept_for_backward(network, functools.partial(network, images)).values())
        with torch.autograd.graph.saved_tensors_hooks(lambda t, seen=seen: seen.append(t) or t, lambda t: t):
            network(images)
        own, weights = ({t.data_ptr() for t in part} for part in (network.state_dict().values(), network.parameters()))
        memory, size = lambda t: t.untyped_storage().data_ptr(), lambda t: t.untyped_storage().nbytes()
        each = lambda _: object()  # as often as it is seen

        def total(key, size, left_out=frozenset(), seen=seen, memory=memory):
            return sum({key(t): size(t) for t in reversed(seen) if memory(t) not in left_out}.values())

        view = "A view may begin elsewhere in the same memory: tell memories apart by untyped_storage().data_ptr()."
        whole = "A view keeps the whole memory that it is part of: its size is untyped_storage().nbytes()."
        why = {
            total(
                each, lambda t: t.nbytes
            ): "You count every tensor that is seen, weights too, and shared memory twice.",
            total(memory, size): "The model's own parameters and buffers are not activations.",
            total(memory, size, weights): "Batch norm's running statistics are buffers: leave them out.",
            total(each, lambda t: t.nbytes, own): "Some tensors share their memory: count it once.",
            total(each, size, own): "Some tensors share their memory: count it once.",
            total(torch.Tensor.data_ptr, size, own): view,
            total(torch.Tensor.data_ptr, lambda t: t.nbytes, own): view,
            total(memory, lambda t: t.nbytes, own): whole,
        }
        given = answer(network, images)
        if given != right:
            return f"for {name} you count {given} bytes; it keeps {right}. {why.get(given, '')}"
    return None


@_says
def best_time(answer):
    """06: `answer(flops, bytes, rate, bandwidth)` is the least time of an op, and what it waits for."""
    for flops, moved, rate, bandwidth in [(8e12, 1e9, 4e12, 1e12), (1e9, 6e12, 1e12, 2e12), (0, 1e6, 1e12, 1e9)]:
        right = max(flops / rate, moved / bandwidth), "compute" if flops / rate > moved / bandwidth else "memory"
        given = answer(flops, moved, rate, bandwidth)
        of = f"for {flops:g} FLOPs at {rate:g} FLOP/s and {moved:g} bytes at {bandwidth:g} bytes/s"
        if not isinstance(given, tuple | list) or len(given) != 2 or isinstance(given[0], str):
            return f'you return {given!r}; asked for are two values, first the seconds, then "compute" or "memory"'
        both = flops / rate + moved / bandwidth
        if not math.isclose(given[0], right[0], rel_tol=1e-6):
            added = math.isclose(given[0], both, rel_tol=1e-6)
            why = " You add up two times that pass at once: the longer one counts." if added else ""
            return f"{of} you give {given[0]:g} s; it is {right[0]:g} s.{why}"
        if given[1] != right[1]:
            return f"{of} you say {given[1]!r}; the op waits for {right[1]}"
    return None


@_says
def batch_that_fits(answer):
    """06: `answer(peak, memory)` is the largest batch with peak(batch) <= memory, found with few calls of `peak`."""
    for right, memory in [(7, 1000), (1, 1000), (0, 1000), (21, 1000), (1000, 2_000_000), (64, 9000)]:
        calls = []

        def peak(batch, right=right, memory=memory, calls=calls):
            calls.append(batch)
            if batch > 100_000 or len(calls) > 5000:
                raise ValueError(f"the search does not end: call {len(calls)} asks for batch {batch}")
            return memory + batch * batch - right * right

        given = answer(peak, memory)
        if given != right:
            power = 2 ** max(0, right.bit_length() - 1)
            faults = {
                right + 1: "That one does not fit.",
                power: "You stop at a power of two: more may fit, up to the next one.",
                right - 1: "One more fits: peak(batch) may equal memory.",
            }
            return f"you give {given} where {right} is the largest that fits. {faults.get(given, '')}"
        if len(calls) > 25:
            return f"you call peak {len(calls)} times to find {right}; 25 are enough"
    return None


@_says
def verdict(answer):
    """07: `answer(low, high)` puts an interval of a speed ratio into words: "faster", "slower" or "undecided"."""
    cases = [(1.2, 1.5, "faster"), (0.6, 0.7, "slower"), (1.01, 1.02, "faster"), (0.97, 0.99, "slower")]
    cases += [(0.96, 1.04, "undecided"), (0.9, 2.4, "undecided")]
    for low, high, right in cases:
        given = answer(low, high)
        if given != right:
            where = {"faster": "above 1", "slower": "below 1", "undecided": "on both sides of 1"}[right]
            return f"for [{low}, {high}] you say {given!r}, but the interval lies {where}: {right!r}"
    return None


def _weights_after_two(step):
    """Train one small layer by two calls of `step`; returns its weight, its output dtypes and the last loss."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model, images = torch.nn.Linear(4, 1), torch.randn(8, 4)
    dtypes, labels = [], torch.tensor([[0.0], [1.0]] * 4)
    model.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = step(model, optimizer, images, labels)
    return model.weight.detach(), dtypes, loss


def _reference_step(model, optimizer, images, labels, zero_grad=True):
    if zero_grad:
        optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss


@_says
def bf16_step(answer):
    """07: `answer(model, optimizer, images, labels)` does one training step in bf16 on the CPU and returns the loss."""
    weight, dtypes, loss = _weights_after_two(answer)
    if set(dtypes) != {torch.bfloat16}:
        return f"the layer's output is {dtypes[0] if dtypes else 'missing'}. Call the model under bf16 autocast."
    if not isinstance(loss, torch.Tensor):
        return f"you return {loss!r}. Return the tensor, detached: loss.item() would wait for the device at every step."
    if loss.dtype != torch.float32:
        return f"the loss is {loss.dtype}. Compute it inside the autocast block, which keeps it in float32."
    if loss.requires_grad:
        return "the loss still holds its graph, and with it the activations. Return loss.detach()."
    if torch.equal(weight, _weights_after_two(lambda *_: None)[0]):
        return "the weights did not move. Call loss.backward(), then optimizer.step()."
    if torch.equal(weight, _weights_after_two(functools.partial(_reference_step, zero_grad=False))[0]):
        return "the second step added its gradients to those of the first. Call optimizer.zero_grad()."
    right_weight, _, right_loss = _weights_after_two(_reference_step)
    if not (torch.equal(weight, right_weight) and torch.equal(loss, right_loss)):
        return "the weights or the loss are not those of a bf16 step with BCEWithLogitsLoss on this batch."
    return None


@_says
def to_float01(answer):
    """08: `answer(images)` turns uint8 (N, H, W, 3) into float32 (N, 3, H, W) in [0, 1], the input left as it was."""
    images = torch.arange(2 * 4 * 6 * 3).mul(7).remainder(256).to(torch.uint8).reshape(2, 4, 6, 3)
    images[0, 0, 0, 0] = 255
    before, right = images.clone(), images.permute(0, 3, 1, 2).float().div(255)
    given = answer(images)
    if not isinstance(given, torch.Tensor):
        return f"you return {type(given).__name__}, not a tensor"
    if not torch.equal(images, before):
        return "the bytes that were handed in have changed. Work on a copy, such as images.float()."
    if tuple(given.shape) != (2, 3, 4, 6):
        return f"for images of shape (2, 4, 6, 3) you return the shape {tuple(given.shape)}; it should be (2, 3, 4, 6)"
    if given.dtype != torch.float32:
        return f"your batch is {given.dtype}; it should be torch.float32"
    for fault, words in [
        (right * 255, "the values go up to 255. Divide by 255."),
        (right * 255 / 256, "white is 255/256. Divide by 255, so that the largest byte becomes 1."),
        ((right == 1).float(), "nearly all pixels are 0: // cuts off. Make it float before you divide, with /."),
        (before.reshape(2, 3, 4, 6).float() / 255, "the colours are mixed up: reshape cuts them apart. Use permute."),
        (right.flip(1), "red and blue have changed places"),
        (right.transpose(2, 3).reshape(2, 3, 4, 6), "rows and columns have changed places. Permute to (0, 3, 1, 2)."),
    ]:
        if torch.allclose(given, fault):
            return words
    if not torch.allclose(given, right, atol=2e-7, rtol=0):
        return f"the first pixel is {given[0, :, 0, 0].tolist()}; it should be {right[0, :, 0, 0].tolist()}"
    if given.device != images.device or answer(images.to("meta")).device.type != "meta":
        return "your batch is on another device than the images. Take no detour over NumPy or .cpu()."
    return None


_READS = {"item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__format__", "__array__"}


class _Loss(torch.Tensor):
    """A tensor that counts how often the host reads it, or what was computed from it."""

    reads = 0

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        name = getattr(function, "__name__", "")
        _Loss.reads += name in _READS
        with torch._C.DisableTorchFunctionSubclass():
            given = function(*arguments, **(options or {}))
        return given.as_subclass(cls) if type(given) is torch.Tensor else given


@_says
def mean_loss(answer):
    """08: `answer(step, batches)` is the mean of step(*batch), a float; no graphs kept, no read in each step."""
    weight = torch.ones(3, requires_grad=True)
    batches = [(torch.full((3,), float(value)), torch.tensor(1.0)) for value in (4, 1, 1, 2, 2, 5)]
    alive, most, reads, calls = weakref.WeakSet(), 0, [], 0

    class Saved:
        def __init__(self, tensor):
            self.tensor = tensor.detach()

    def pack(tensor):
        alive.add(saved := Saved(tensor))
        return saved

    def step(images, factor):
        nonlocal most, calls
        most, calls = max(most, len(alive)), calls + 1
        reads.append(_Loss.reads)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            loss = (weight * images).mean() * factor
        return loss.as_subclass(_Loss)

    _Loss.reads = 0
    given = answer(step, batches)
    if calls != len(batches):
        return f"step was called {calls} times for {len(batches)} batches"
    if isinstance(given, torch.Tensor):
        return "you return a tensor. Read it once, after the loop, with .item()."
    if len(set(reads)) > 1:
        return f"the loss was read {reads[-1]} times before the last step: each read waits for the device"
    if _Loss.reads > 1:
        return f"after the loop you read {_Loss.reads} tensors, one by one. Join them on the device, and read once."
    graph = 2  # what one loss saves; the last one may still be alive
    if most > 2 * graph:
        return f"before the last step the graphs of {most // graph} losses were alive. Keep loss.detach()."
    right = 2.5
    if isinstance(given, float) and math.isclose(given, right * len(batches)):
        return f"you return {given}, the sum. Divide by the number of batches."
    if isinstance(given, float) and math.isclose(given, 5.0):
        return "you return the loss of the last batch. Add them all up."
    if not isinstance(given, float) or not math.isclose(given, right, rel_tol=1e-6):
        return f"you return {given!r}; the mean of the losses 4, 1, 1, 2, 2, 5 is {right}"
    return None


class _Ascending:
    """Rows on a disk that can be read in ascending order only, as h5py wants it; counts the reads."""

    def __init__(self, rows):
        self.rows, self.reads, self.most = rows, 0, 0
        self.shape, self.dtype = rows.shape, rows.dtype

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, indices):
        self.reads += 1
        if isinstance(indices, slice):
            self.most = max(self.most, len(self.rows[indices]))
            return self.rows[indices].copy()
        chosen = np.atleast_1d(np.asarray(indices))
        if (np.diff(chosen) <= 0).any():
            raise TypeError("Indexing elements must be in increasing order")
        self.most = max(self.most, len(chosen))
        return self.rows[int(indices)].copy() if np.ndim(indices) == 0 else self.rows[chosen]


@_says
def read_batch(answer):
    """08: `answer(images, labels, indices)` reads once, ascending, and returns the batch in the order asked."""
    rows = np.arange(20, dtype=np.uint8)[:, None, None, None].repeat(2, 1).repeat(3, 2).repeat(3, 3)
    labels = torch.arange(20.0).unsqueeze(1)
    for indices in ([3, 7, 8], [14, 2, 9, 5], [9, 0, 1, 19, 4, 12]):
        disk = _Ascending(rows)
        given = answer(disk, labels, list(indices))
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            return "asked for are two values, (images, labels)"
        images, chosen = given
        for name, each in (("images", images), ("labels", chosen)):
            if not isinstance(each, torch.Tensor):
                return f"the {name} are {type(each).__name__}. Return a tensor: torch.from_numpy makes one of an array."
        if images.dtype != torch.uint8:
            return f"the images are {images.dtype}. Leave them uint8: the device makes floats of them."
        if disk.reads > 1:
            return f"you read {disk.reads} times for {len(indices)} images. Ask for all of them at once."
        if disk.most > len(indices):
            return f"you read {disk.most} images for a batch of {len(indices)}"
        if tuple(images.shape) != (len(indices), 2, 3, 3) or tuple(chosen.shape) != (len(indices), 1):
            return f"the shapes are {tuple(images.shape)} and {tuple(chosen.shape)} for {len(indices)} images"
        numbers = images[:, 0, 0, 0].tolist()
        if numbers != indices:
            why = " That is ascending: undo the sorting." if numbers == sorted(indices) else ""
            return f"asked for {indices}, you return the images {numbers}.{why}"
        if chosen.flatten().tolist() != indices:
            return f"the images are {indices}, but their labels are those of {chosen.flatten().int().tolist()}"
    return None


@_says
def shard(answer):
    """09: `answer(length, rank, world)` are the indices that DistributedSampler deals to a process, unshuffled."""
    for length, world in [(6, 2), (10, 3), (7, 1), (2, 5), (12, 5)]:
        for rank in range(world):
            right = list(DistributedSampler(range(length), world, rank, shuffle=False))
            given = [int(index) for index in answer(length, rank, world)]
            if given == right:
                continue
            deal = f"of {length} indices process {rank} of {world} gets {right}, in your deal {given}"
            if sorted(given) == sorted(right):
                return f"{deal}: the same ones in another order"
            if length % world and given == list(range(length))[rank::world]:
                return f"{deal}: all processes must get the same number; deal the first indices once more"
            return deal
    return None


@_says
def bytes_sent(answer):
    """09: `answer(weights, bytes_each, world)` is what a process sends in one ring all-reduce, in bytes."""
    for weights, size, world in [(1000, 4, 1), (10**6, 4, 2), (10**6, 2, 2), (10**6, 4, 3), (4_008_829, 2, 8)]:
        given, right = float(answer(weights, size, world)), 2 * (world - 1) / world * weights * size
        if math.isclose(given, right, rel_tol=1e-6, abs_tol=1e-6):
            continue
        case = f"{weights:,} weights of {size} bytes, {world} processes: {right:,.0f} bytes, and you say {given:,.0f}"
        if math.isclose(2 * given, right, rel_tol=1e-6):
            return f"{case}. The sums go round the ring once, and the finished averages once more"
        return case
    return None


@_says
def mean_over_processes(answer):
    """09: `answer(means, counts)` is the mean over all images, from each process's mean and number of images."""
    for means, counts in [([0.5, 1.0], [10, 10]), ([0.5, 1.0], [30, 10]), ([0.25, math.nan, 0.75], [4, 0, 12])]:
        right = sum(mean * count for mean, count in zip(means, counts) if count) / sum(counts)
        given = float(answer(list(means), list(counts)))
        if math.isclose(given, right, rel_tol=1e-6):
            continue
        case = f"means {means} over {counts} images: {right:g} over all, and you say {given:g}"
        if math.isnan(given):
            return f"{case}. NaN times 0 is NaN; leave out who saw nothing"
        if math.isclose(given, float(np.nanmean(means)), rel_tol=1e-6):
            return f"{case}. A process with more images weighs more"
        return case
    return None


_OLD_FLAGS = [
    ({"precision": 16, "max_epochs": 3}, {"precision": "16-mixed", "max_epochs": 3}),
    ({"gpus": 2, "distributed_backend": "ddp"}, {"accelerator": "gpu", "devices": 2, "strategy": "ddp"}),
    ({"gpus": 0, "nb_gpu_nodes": 1}, {"accelerator": "cpu", "num_nodes": 1}),
    ({"use_amp": True, "amp_level": "O1", "amp_backend": "apex"}, {"precision": "16-mixed"}),
    ({"use_amp": False, "gradient_clip_val": 0.5}, {"gradient_clip_val": 0.5}),
    ({"precision": 16, "amp_level": "O3"}, {"precision": "16-true"}),
    ({"precision": 16, "amp_level": "O0", "gpus": None}, {"precision": "32-true", "accelerator": "cpu"}),
]


@_says
def translate(answer):
    """10: `answer(old)` are the arguments of today's Trainer for a dict of old flags."""
    for old, right in _OLD_FLAGS:
        given = answer(dict(old))
        for flag in right | dict(given):
            if given.get(flag) != right.get(flag):
                fault = f"should be {right[flag]!r}" if flag in right else "does not belong there"
                return f"from {old} you make {given}: {flag} {fault}"
    return None


@_says
def unscale_and_clip(answer):
    """10: `answer(gradients, scale, max_norm)` are the gradients unscaled, then clipped by their global norm."""
    exact = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]]), torch.zeros(2)]
    for scale, max_norm in [(1024.0, 1.0), (65536.0, 100.0)]:
        given = answer([gradient * scale for gradient in exact], scale, max_norm)
        replies = {
            scale * min(1.0, max_norm / 5): "they are still scaled",
            min(1.0, max_norm / 5 / scale): "you clip first: the norm is then that of the scaled gradients",
            1.0: "nothing is clipped: the norm of all together is 5",
            max_norm / 5: "a norm below max_norm should be left as it is",
            min(1.0, max_norm / 5): None,
        }
        wrong = "not all have the same factor. One norm, of all together, gives one factor for all"
        for factor, reply in replies.items():
            if all(torch.allclose(mine, factor * right, rtol=1e-4, atol=0) for mine, right in zip(given, exact)):
                wrong = reply
        if wrong or len(given) != 3:
            return f"gradients [3, 0], [[4]] and [0, 0], times {scale:g}; max_norm {max_norm:g}: {wrong}"
    return None


@_says
def optimizer_steps(answer):
    """10: `answer(images, batch, k, epochs)` are the steps when every epoch ends with one."""
    for images, batch, k, epochs in [(1797, 64, 1, 1), (1792, 64, 4, 2), (1797, 64, 3, 4), (5, 8, 4, 3)]:
        given, batches = answer(images, batch, k, epochs), math.ceil(images / batch)
        right = math.ceil(batches / k) * epochs
        case = f"{images} images in batches of {batch}, k={k}, {epochs} epochs: {right} steps, and you say {given}"
        if given == right:
            continue
        if given in (images // batch // k * epochs, batches // k * epochs):
            return f"{case}. What is left over counts too: round up"
        early = given == math.ceil(batches * epochs / k)
        return f"{case}. Every epoch ends with a step: round up before you multiply" if early else case


@_says
def block_exponent(answer):
    """11: `answer(amax, name)` is the smallest exponent of an E8M0 scale that cuts nothing of a block off."""
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


@_says
def to_e5m2(answer):
    """11: `answer(x, noise)` rounds fp16 to E5M2 numbers stochastically, adding `noise` to the bits."""
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


@_says
def next_scale(answer):
    """11: `answer(history, scale, margin)` is the next scale for E4M3; the old one if the history is of no use."""
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
