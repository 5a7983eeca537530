"""Numbers that 16 bits are too coarse for: each op again in float32, sums, positions, ids, columns of an input."""

import functools
import math
import re
from contextlib import suppress

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from halfbits._tensors import (
    FP32,
    LARGEST,
    SAMPLE,
    SIXTEEN,
    WHOLE,
    _floats,
    _gpus,
    _largest,
    _last_whole,
    _mapped,
    _sample,
    _short,
    _spacing,
    _spacings,
    _tensors,
    _went_through,
)
from halfbits.report import certain, likely


def _in_float32(call, args, kwargs, device):
    """The tensors that the same op makes of the same numbers in float32; none where it cannot."""
    with suppress(Exception), torch.random.fork_rng(_gpus(device), device_type=device.type):
        dtypes = {key: FP32 for key, each in kwargs.items() if each in SIXTEEN}
        places = [FP32 if isinstance(each, torch.dtype) and each in SIXTEEN else each for each in args]
        return _tensors(call(*_floats(places), **_floats(kwargs) | dtypes))
    return []


FACTORIES = ("empty", "zeros", "ones", "full", "new_", "rand")
ADDS = ("add", "add_", "index_add_", "scatter_add_", "index_put_")
PARTS = ("index", "select", "slice", "gather", "view")
COARSE = ("_to_copy", "sin", "cos", "arange", "cumsum")


class _Wide:
    """A forward as float32 would do it, beside the one in 16 bits: each op again, on what float32 gave so far. `far`: a
    Finding of the first op whose result is far from float32's, though its operands were near."""

    def __init__(self, device):
        self.device, self.right, self.far = device, WeakTensorKeyDictionary(), []

    def do(self, op, func, args, kwargs):
        """What the op makes of float32's numbers: nothing if there are no 16 bits, or if they are random."""
        dtypes = [each for each in [*args, *kwargs.values()] if isinstance(each, torch.dtype)]
        near = any(each in self.right or each.dtype in SIXTEEN for each in _tensors((args, kwargs)))
        low = near or set(dtypes) & set(SIXTEEN)
        if not low or torch.Tag.nondeterministic_seeded in func.tags or op.startswith(FACTORIES):
            return []
        given = functools.partial(self._given, func._schema.is_mutable)
        return _in_float32(func, _mapped(given, args), _mapped(given, kwargs), self.device)

    def _given(self, written, tensor):
        if tensor in self.right:
            return self.right[tensor][0]
        return tensor.clone() if written else tensor

    def compare(self, module, op, args, output, right):
        outputs, given = _tensors(output), [self.right[each][1:] for each in _tensors(args) if each in self.right]
        before, source = max(given, default=(0.0, ""))
        for place, (each, wide) in enumerate(zip(outputs, right) if len(outputs) == len(right) else ()):
            off = float((each.float() - wide).norm() / wide.norm()) if each.shape == wide.shape else math.nan
            if each.dtype in SIXTEEN and not source:
                source = f"{'cast' if op == '_to_copy' else op} to {_short(each.dtype)} in {module or 'the model'}"
            self.right[each] = wide, off, source
            if place == 0 and op in ("addmm", "convolution", "add") and each.dtype in SIXTEEN and each.numel() > 31:
                self.far += _offset(module, op, each.dtype, wide)
            first = place == 0 and not self.far  # others are what a norm saves, as a mean near 0
            if first and 0.1 < off < math.inf and before < 0.01 and each.numel() > 1 and op != "_to_copy":
                what = f"{op} gives numbers that are {off:.0%} off float32's, of operands that are {before:.1%} off"
                cost = f"16 bits are too coarse for what it is given; they came in by {source}. Compute it in float32."
                self.far.append(likely(what, module, cost))


def _offset(module, op, dtype, right):
    """Numbers whose digits an offset takes away."""
    spread, size = float(right.std()), float(right.abs().median())
    if 1 < size < LARGEST and 1e-6 * size < spread < _spacing(size, dtype):
        apart = f"where {_short(dtype)}'s neighbours are {_spacing(size, dtype):g} apart"
        what = f"{op} gives numbers near {size:,.4g} that differ by {spread:.2g}, {apart}"
        yield likely(what, module, "Add the offset in float32, to the result.")


class _Sums:
    """Sums in 16 bits without gradients: whether they still take up what is added, of those with so many terms."""

    def __init__(self, terms=128):  # within a model fewer may be its blocks
        self.terms, self.counts = terms, WeakTensorKeyDictionary()

    def do(self, where, op, func, args, kwargs):
        """What the op gives, and Findings."""
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        count = 0 if first is None else self.counts.get(first, 0)
        adds = first is not None and op in ADDS and first.dtype in SIXTEEN and not first.requires_grad
        due = adds and count >= self.terms and (first.numel() <= SAMPLE or count % 64 == 0)
        before, found = first.float() if due else None, []
        output = func(*args, **kwargs)
        if (adds and output.dtype in SIXTEEN) or (count and op in PARTS):
            self.counts[output] = count + adds
        with suppress(Exception):
            right = _in_float32(func, (before.clone(), *args[1:]), kwargs, before.device) if due else []
            found = [*_added(where, before, right[0], output)] if right else []
        return output, found


def _coarse(module, op, args, output):
    """Findings of whole numbers, angles, columns and decays that 16 bits make equal."""
    source = args[0] if args and isinstance(args[0], torch.Tensor) else output
    if op == "_to_copy" and output.dtype in WHOLE and source.dtype == FP32:
        yield from _rounded_numbers([output], f"an index, in {module or 'the model'}")
    dtype = source.dtype if source.dtype in SIXTEEN else output.dtype
    if dtype not in SIXTEEN or not output.numel() or not op.startswith(COARSE):
        return
    size, last = _largest([source] if source.dtype in SIXTEEN else []), _last_whole(dtype)
    together = f"Above {last:,.0f} neighbours fall together. Keep"
    if op == "_to_copy" and output.dtype in (torch.int32, torch.int64) and last < size < math.inf:
        what = f"whole numbers up to {size:,.0f} come out of {_short(dtype)}"
        yield likely(what, module, f"{together} indices as integers.")
    elif op in ("sin", "cos") and 0 < size < math.inf and (step := _spacing(size, dtype)) > 0.5:
        what = f"{op} of {_short(dtype)} up to {size:,.0f}, where neighbours are {step:g} apart: a period is 6.28"
        yield likely(what, module, "Compute angles in float32; FSDP2 casts inputs too, if told to.")
    elif op == "_to_copy" and output.numel() > 2 and source.max() < 1 and output.min() == 1:
        what = f"all {output.numel():,} numbers, {source.min():.5g} to {source.max():.5g}, become 1 in {_short(dtype)}"
        yield likely(what, module, "As decays they forget nothing, and 1 minus them is 0. Keep them in float32.")
    elif op in ("arange", "cumsum", "_to_copy") and output.dtype in SIXTEEN and _largest([output]) > last:
        whole = source.unique() if op == "_to_copy" else torch.arange(output.numel())
        if (whole.diff() == 1).all() and (left := output.unique().numel()) < len(whole):
            what = f"{len(whole):,} whole numbers in a row become {left:,} in {_short(dtype)}"
            yield likely(what, module, f"{together} positions in FP32.")
        elif op == "_to_copy" and source.dtype not in SIXTEEN and not source.requires_grad and source.dim() < 4:
            yield from _coarse_columns(module, source, dtype)


def _coarse_columns(module, source, dtype):
    """Columns of an input whose differences a cast takes away, as of a year, or whole numbers, as times."""
    columns = source.reshape(-1, source.shape[-1] if source.dim() > 1 else 1)[:256].T[:64]
    for place, (before, after) in enumerate(zip(columns, columns.to(dtype))):
        had, left, size = before.unique().numel(), after.unique().numel(), before.abs().max()
        whole = size > _last_whole(dtype) and torch.equal(before, before.round())
        few_steps = before.max() - before.min() < 4 * torch.finfo(dtype).eps * size
        if had > 2 and (left < had if few_steps else whole and left < 2 * had / 3):
            ends = f"{before.min():,.6g} to {before.max():,.6g}"
            what = f"column {place} of an input, {ends}: its {had} values become {left} in {_short(dtype)}"
            yield likely(what, module, "Subtract its mean, or scale it, before it is cast.")


def _decays(op, args):
    """A decay so near to 1 that 16 bits do not hold it."""
    decay = re.fullmatch("(_foreach_)?(mul|lerp)_?", op)
    factor, kept = (args[-1], _tensors(args[:1])[:1]) if decay else (None, [])
    if not (isinstance(factor, float) and kept and kept[0].dtype in SIXTEEN and not kept[0].requires_grad):
        return
    if 0 < abs(factor - ("mul" in op)) < torch.finfo(kept[0].dtype).eps / 4:
        cost = "Less than half a step: as of an average, it stands still. Keep it in FP32."
        what = f"a factor of {factor:g} in {_short(kept[0].dtype)}"
        yield likely(what, f"{decay[2]}, between the model's passes", cost)


def _added(where, before, right, output):
    """A sum that has become too large for what it takes up, as 256 in bf16 for a 1."""
    got, more = (output.float() - before).abs(), (right - before).abs()
    off = ~((got - more).abs() <= more / 10) & more.isfinite()
    lost = (got - more)[off].abs().sum() > more[more.isfinite()].sum() / 5
    if lost or 2 * off.sum() > (more != 0).sum():
        none, place = not got[off].any(), more.masked_fill(~off, -1).argmax()
        total, got, more = (float(each.reshape(-1)[place]) for each in (output.abs(), got, more))
        what = f"a sum in {_short(output.dtype)} that has come to {total:g} takes up {got:.3g} for {more:.3g}"
        cost = "What is added is rounded away, as in a metric, an average of weights, a sampler's steps: use float32."
        yield (certain if none and "between" in where else likely)(what, where, cost)


def _compared(op, args):
    """Numbers that were stored in 16 bits, beside others that are nearer to them than 16 bits can tell."""
    pair = _tensors(args[:2]) if op in ("sub", "div", "mse_loss", "smooth_l1_loss", "kl_div") else []
    for fine, coarse in (pair, pair[::-1]) if len(pair) == 2 and pair[0].shape == pair[1].shape else ():
        dtype = None if coarse.requires_grad else _went_through(coarse)
        if fine.dtype == FP32 and dtype and not _went_through(fine):
            apart = (_sample(fine) - _sample(coarse)).abs().median()
            if apart < 2 * (step := _spacings(_sample(coarse), dtype).median()):
                what = f"{op} of float32 and of numbers that went through {_short(dtype)}: they are {apart:.2g} apart, "
                cost = "Mostly that is rounding, as of log-probabilities that were stored: keep them in FP32."
                yield likely(f"{what}where neighbours are {step:.2g} apart", "in the loss", cost)


def _rounded_numbers(value, where):
    """Ids or labels that are no longer what they were."""
    for dtype in filter(None, map(_went_through, _tensors(value, WHOLE))):
        above = f"above {_last_whole(dtype):,.0f} neighbours fell together"
        cost = "As of ids or labels in a batch that was cast: keep them as integers."
        yield likely(f"whole numbers that went through {_short(dtype)}: {above}", where, cost)
