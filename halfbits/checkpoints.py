"""Would a checkpoint survive another format? Its numbers are rounded, and the losses counted.

The file format is that of https://github.com/huggingface/safetensors#format; the sources of the
number formats stand in `halfbits.formats`.
"""

import json
import math
import re
import zipfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch

from halfbits.formats import FORMATS, FloatFormat

_CHUNK = 2**18  # numbers that a thread reads at a time: a multiple of every block's size
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_READABLE = set(_DTYPES.values())
_OPTIMIZER = "optimizer state"  # stands for the dtype of what is no weight
_PACKED = {"int8", "uint8", "int32", "I8", "U8", "I32"}  # in which quantizers keep weights
_E4M3 = FORMATS["fp8_e4m3fn"]
_E2M1 = FORMATS["fp4_e2m1fn"]
_SUMS = ["nonfinite", "overflows", "zeros", "signal", "noise"]


class _Stored(NamedTuple):
    """A tensor in a file: `data` is its bytes, mapped into memory and not yet read."""

    name: str
    dtype: torch.dtype | str  # a string where safetensors has a dtype that is not in `_DTYPES`
    shape: tuple[int, ...]
    data: np.ndarray | None  # uint8; None where the dtype is not readable


class _Recipe(NamedTuple):
    """How a format stores numbers: as `element`, where `block` numbers in a row share a scale.

    scale: of the blocks, [blocks, block], and the largest magnitude of the tensor, it computes the
        factors that come before the rounding, and the scales after it. Then what overflows is cut
        off; without a scale it becomes inf or NaN.
    """

    element: FloatFormat
    block: int | None = None
    scale: Callable | None = None


def _tensor_scale(numbers, largest):
    factor = _E4M3.max / largest.clamp(min=1e-12)  # the limit is that of torchao
    return factor, 1 / factor


def _mx_scale(blocks, largest, element):
    powers = _power_of_two(blocks.abs().amax(-1, keepdim=True))
    scales = (powers / 2.0 ** math.floor(math.log2(element.max))).clamp(2.0**-127, 2.0**127)
    return 1 / scales, scales


def _nvfp4_scale(blocks, largest):
    tensor_scale = (largest / (_E2M1.max * _E4M3.max)).clamp(min=2.0**-121)
    wanted = blocks.abs().amax(-1, keepdim=True) / _E2M1.max / tensor_scale
    block_scales = _nearest(wanted.clamp(_E4M3.smallest_normal, _E4M3.max), _E4M3)
    return 1 / tensor_scale / block_scales, block_scales * tensor_scale


_RECIPES = {
    "fp16": _Recipe(FORMATS["fp16"]),
    "bf16": _Recipe(FORMATS["bf16"]),
    "fp8_e4m3fn": _Recipe(_E4M3),
    "fp8_scaled": _Recipe(_E4M3, None, _tensor_scale),
    "mxfp8": _Recipe(_E4M3, 32, lambda blocks, largest: _mx_scale(blocks, largest, _E4M3)),
    "mxfp4": _Recipe(_E2M1, 32, lambda blocks, largest: _mx_scale(blocks, largest, _E2M1)),
    "nvfp4": _Recipe(_E2M1, 16, _nvfp4_scale),
}
SCANNED_FORMATS = tuple(_RECIPES)


def scan(
    path: str | Path,
    formats: Iterable[str] = SCANNED_FORMATS,
    progress: Callable[[int, int], None] | None = None,
) -> pd.DataFrame:
    """What each format would make of a checkpoint's weights, a row for each tensor and format.

    path: a .safetensors file, a folder of them, or a file of torch.save (.pt, .pth, .bin) with a
        tensor or nested dicts of tensors. Nothing in it is executed, and a part at a time is in
        memory; only files of torch.save from before PyTorch 1.6 are loaded whole.
    formats: of "fp16", "bf16", "fp8_e4m3fn" (no scale), "fp8_scaled" (E4M3 with one scale for the
        tensor), and `halfbits.formats`'s "mxfp8" (E4M3), "mxfp4" and "nvfp4".
    progress: called as progress(done, total), in bytes, after each part.

    The columns:

    - `tensor`, its name; `dtype`, `dimensions` and `numbers`, as it is stored; `format`
    - `nonfinite`: how many numbers are inf or NaN already. They count nowhere else.
    - `overflows`: how many numbers round past the format's largest. In a format without a scale
      they become inf or NaN, in the others they are cut off to the largest.
    - `zeros`: how many become 0 and were not
    - `error`: the norm of the differences divided by the norm of the numbers, over the numbers
      that stay finite; NaN where these are all 0
    - `signal`, `noise`: the squares of these norms, which can be added up over tensors

    `attrs["notes"]` has a sentence for whatever else there is, such as tensors of integers.

    Blocks run along the last dimension; in tensors of three dimensions or more along all but the
    first, as a convolution's kernels lie in a matrix product. The last block may be shorter.
    Libraries leave tensors of one dimension (norms, biases), and often the embedding and the last
    layer, in a wider format: select these rows away, as in `table[table["dimensions"] > 1]`.

    A scan of weights knows nothing of activations and gradients, which often have the wider range.
    Nor does it know whether the model tolerates the error: only an evaluation of the model does.

    Raises FileNotFoundError; ValueError for a file that is no checkpoint, or another format.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"weight": torch.tensor([[1.0, 70000.0, 1e-9]])}, f"{folder}/model.pt")
    ...     table = scan(f"{folder}/model.pt", formats=["fp16", "bf16"])
    >>> print(table[["tensor", "format", "overflows", "zeros"]].to_string(index=False))
    tensor format  overflows  zeros
    weight   fp16          1      1
    weight   bf16          0      0
    """
    formats = list(formats)
    unknown = [name for name in formats if name not in _RECIPES]
    if unknown:
        raise ValueError(f"scan has no format {unknown[0]!r}: take one of {', '.join(_RECIPES)}")
    tensors = _tensors(Path(path))
    readable = [each for each in tensors if each.data is not None]
    total = sum(each.data.size for each in readable)
    done = 0
    rows = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # The parts of a tensor go to as many threads, each of which is alone.
    try:
        with ThreadPoolExecutor(min(threads, 8)) as pool:
            for each in readable:
                sums = 0
                for size, losses in _part_losses(each, formats, pool):
                    sums = sums + losses
                    done += size
                    if progress:
                        progress(done, total)
                dtype = str(each.dtype).removeprefix("torch.")
                tensor = [each.name, dtype, len(each.shape), math.prod(each.shape)]
                rows += [[*tensor, name, *losses] for name, losses in zip(formats, sums)]
    finally:
        torch.set_num_threads(threads)
    columns = ["tensor", "dtype", "dimensions", "numbers", "format", *_SUMS]
    table = pd.DataFrame(rows, columns=columns)
    table = table.astype({"nonfinite": int, "overflows": int, "zeros": int})
    table.insert(columns.index("signal"), "error", np.sqrt(table["noise"] / table["signal"]))
    table.attrs["notes"] = _notes(tensors)
    return table


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """One row for each format of a table by `scan`: all tensors together, and the worst of them.

    The columns: `format`; the sums of `numbers`, `nonfinite`, `overflows` and `zeros`; `error` over
    all numbers, which is no mean of the tensors' errors; `worst`, the name of the tensor that the
    function `worst` puts first, and `worst_error`, its error.

    >>> names = {"tensor": ["a", "b"], "format": "fp16", "numbers": 9, "nonfinite": 0}
    >>> losses = {"overflows": 0, "zeros": 1, "error": [0.5, 0.1]}
    >>> table = pd.DataFrame(names | losses | {"signal": [1.0, 99.0], "noise": [0.25, 0.75]})
    >>> summary(table)[["format", "zeros", "error", "worst"]].to_dict("records")
    [{'format': 'fp16', 'zeros': 2, 'error': 0.1, 'worst': 'a'}]
    """
    sums = table.groupby("format", sort=False)[["numbers", *_SUMS]].sum()
    sums["error"] = np.sqrt(sums.pop("noise") / sums.pop("signal"))
    first = worst(table, count=1).set_index("format")
    sums["worst"] = first["tensor"]
    sums["worst_error"] = first["error"]
    return sums.reset_index()


def worst(table: pd.DataFrame, count: int = 3) -> pd.DataFrame:
    """The rows of the `count` worst tensors for each format of a table by `scan`, the worst first.

    These are the tensors of whose numbers the largest share becomes inf or NaN, then those with
    the largest error.

    >>> losses = {"tensor": ["a", "b"], "numbers": 9, "overflows": [0, 1], "error": [0.5, 0.1]}
    >>> worst(pd.DataFrame(losses | {"format": "fp16"}), count=1)["tensor"].item()
    'b'
    """
    unscaled = [name for name, recipe in _RECIPES.items() if recipe.scale is None]
    share = table["overflows"] / table["numbers"]
    lost = share.where(table["format"].isin(unscaled), 0)
    ranked = table.assign(order=pd.factorize(table["format"])[0], lost=lost)
    ranked = ranked.sort_values(["order", "lost", "error"], ascending=[True, False, False])
    return ranked.drop(columns=["order", "lost"]).groupby("format").head(count)


def _part_losses(stored, formats, pool):
    """For each part of a tensor: its bytes, and the `_SUMS` of its numbers in each format."""
    columns = math.prod(stored.shape[1:] if len(stored.shape) > 1 else stored.shape)
    height = max(_CHUNK // columns, 1)
    width = _CHUNK * stored.dtype.itemsize
    matrix = stored.data.reshape(-1, columns * stored.dtype.itemsize)
    tops = range(0, matrix.shape[0], height)
    lefts = range(0, matrix.shape[1], width)
    # Whole rows, or pieces of one.
    parts = [matrix[top : top + height, left : left + width] for top in tops for left in lefts]

    def read(part):
        numbers = torch.from_numpy(part.copy()).view(stored.dtype)
        numbers = numbers if stored.dtype == torch.float64 else numbers.float()
        return numbers, numbers.nan_to_num(0.0, 0.0, 0.0)

    largest = max(pool.map(lambda part: read(part)[1].abs().max(), parts))

    def losses(part):
        numbers, finite = read(part)
        nonfinite = int((numbers != finite).count_nonzero())
        whole = (int(finite.count_nonzero()), _squares(finite))
        rows = [_losses(finite, whole, largest, *_RECIPES[name]) for name in formats]
        return np.array([[nonfinite, *row] for row in rows])

    for part, found in zip(parts, pool.map(losses, parts)):
        yield part.size, found


def _losses(numbers, whole, largest, element, block, scale):
    """What follows "nonfinite" in `_SUMS`, for `numbers`, [rows, columns], all of them finite.

    whole: how many of them are not 0, and the sum of their squares.
    largest: the largest magnitude in their tensor. What follows is as in `_Recipe`.
    """
    if block:
        padding = -numbers.shape[1] % block
        numbers = torch.nn.functional.pad(numbers, (0, padding)).view(-1, block)
    factors, scales = scale(numbers, largest) if scale else (1, 1)
    scaled = numbers * factors
    past = None
    if max(-scaled.min(), scaled.max()) > element.max:
        # The midpoint of the largest number and the next rounds to the even one of these two.
        midpoint = element.max + element.spacing(element.max) / 2
        compare = torch.ge if element.encode(element.max) % 2 else torch.gt
        past = compare(scaled.abs(), midpoint)
        scaled = scaled.clamp(-element.max, element.max)
    rounded = _nearest(scaled, element) * scales
    nonzero, signal = whole
    if past is not None and scale is None:
        rounded = torch.where(past, numbers, rounded)
        signal = _squares(numbers.masked_fill(past, 0))
    overflows = 0 if past is None else int(past.count_nonzero())
    zeros = nonzero - int(rounded.count_nonzero())
    return [overflows, zeros, signal, _squares(numbers - rounded)]


def _squares(numbers):
    numbers = numbers.double().flatten()
    return float(numbers @ numbers)


def _nearest(numbers, element):
    """`numbers`, none past the largest of `element`, rounded to it; a midpoint to the even one."""
    if element.name == "bf16" and numbers.dtype == torch.float32:  # the offset would overflow
        return numbers.bfloat16().float()
    # To the sum of number and offset, a unit in the last place is the spacing of `element`.
    offset = _power_of_two(numbers).clamp_(min=element.smallest_normal)
    offset *= 1.5 * element.eps / torch.finfo(numbers.dtype).eps
    return (numbers + offset).sub_(offset)


def _power_of_two(numbers):
    """The largest power of two up to the magnitude of each number; 0 for a subnormal one."""
    if numbers.dtype == torch.float64:
        return (numbers.view(torch.int64) & 0x7FF0000000000000).view(torch.float64)
    return (numbers.view(torch.int32) & 0x7F800000).view(torch.float32)


def _tensors(path):
    """The tensors of a file, or of the safetensors files in a folder; none without numbers."""
    files = [path]
    if path.is_dir():
        files = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.bin"))
        for index in path.glob("*.index.json"):
            _raise_if_missing(index)
    if not files or not path.exists():
        raise FileNotFoundError(f"no {path}, or no .safetensors file in it: correct the path")
    found = {}
    for file in files:
        for stored in _read(file):
            if stored.name in found:
                raise ValueError(f"two files in {path} hold {stored.name!r}: name one of them")
            found[stored.name] = stored
    return [stored for stored in found.values() if math.prod(stored.shape)]


def _raise_if_missing(index):
    """Raise ValueError where a shard that an index names is not there."""
    named = set(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values())
    missing = sorted(name for name in named if not (index.parent / name).exists())
    if missing:
        raise ValueError(f"{index} names {missing[0]}, which is not there: download it again")


def _read(path):
    with path.open("rb") as file:
        start = file.read(32)
    if not start:
        raise ValueError(f"{path} is empty: download it again")
    if start.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path} is a Git LFS pointer, not the checkpoint: run `git lfs pull`")
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        return _read_torch(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"scan reads .safetensors, .pt, .pth, .ckpt and .bin files: {path} is none")
    if start.startswith((b"PK", b"\x80")) and start[8:9] != b"{":
        raise ValueError(f"{path} is a PyTorch file, not a safetensors file: rename it to .pt")
    return _read_safetensors(path, 8 + int.from_bytes(start[:8], "little"))


def _read_safetensors(path, header_end):
    data = np.memmap(path, np.uint8, "r").view(np.ndarray)
    wrong = f"{path} is no safetensors file, or damaged"
    if header_end > data.size:
        raise ValueError(f"{wrong}: its header ends past the end of the file; download it again")
    try:
        header = dict(json.loads(data[8:header_end].tobytes()))
    except (ValueError, TypeError, RecursionError):
        raise ValueError(f"{wrong}: its header is no JSON object; download it again") from None
    header.pop("__metadata__", None)
    tensors = []
    for name, entry in header.items():
        try:
            dtype = _DTYPES.get(entry["dtype"], entry["dtype"])
            shape = tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            valid = all(isinstance(each, int) and each >= 0 for each in (*shape, begin, end))
            if valid and dtype in _READABLE:
                valid = end - begin == math.prod(shape) * dtype.itemsize
        except (KeyError, TypeError, ValueError):
            valid = False
        if not valid:
            raise ValueError(f"{wrong}: its header is wrong about {name!r}; download it again")
        if header_end + end > data.size:
            raise ValueError(f"{wrong}: {name!r} ends past the end of the file; download it again")
        part = data[header_end + begin : header_end + end] if dtype in _READABLE else None
        tensors.append(_Stored(name, dtype, shape, part))
    return tensors


def _read_torch(path):
    try:
        saved = torch.load(path, "cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch.load raises whatever the bytes lead to
        cause = f"{path} is no file of torch.save, or holds more than tensors"
        raise ValueError(f"{cause} ({type(error).__name__}): save a state_dict()") from error
    tensors = []
    for name, tensor in _walk(saved, ""):
        data = None
        dtype = _OPTIMIZER if re.match(r"optimizer\w*\.state\.", name) else tensor.dtype
        if dtype in _READABLE and tensor.layout == torch.strided:
            data = tensor.detach().reshape(-1).view(torch.uint8).numpy()
        tensors.append(_Stored(name, dtype, tuple(tensor.shape), data))
    if not tensors:
        raise ValueError(f"{path} holds no tensors: save a state_dict()")
    return tensors


def _walk(saved, prefix):
    """The tensors in nested dicts, each with the keys that lead to it."""
    if isinstance(saved, torch.Tensor):
        yield prefix.removesuffix("."), saved
    if isinstance(saved, dict):
        for key, value in saved.items():
            yield from _walk(value, f"{prefix}{key}.")


def _notes(tensors):
    notes = []
    left_out = [each for each in tensors if each.data is None]
    for dtype in dict.fromkeys(each.dtype for each in left_out):
        sizes = [math.prod(each.shape) for each in left_out if each.dtype == dtype]
        name = str(dtype).removeprefix("torch.")
        notes.append(f"Left out: {name} (tensors: {len(sizes)}, numbers: {sum(sizes):,}).")
    packed = [each for each in left_out if str(each.dtype).removeprefix("torch.") in _PACKED]
    floats = [each for each in tensors if each.data is not None]
    if sum(math.prod(each.shape) for each in packed) > sum(math.prod(each.shape) for each in floats):
        notes.append("Most numbers are not floating-point: the checkpoint is quantized already.")
    if any(each.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) for each in tensors):
        notes.append("FP8 tensors were read without the scales that the checkpoint may have.")
    return notes
