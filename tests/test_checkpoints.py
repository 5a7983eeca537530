"""halfbits.checkpoints: its rounding is that of halfbits.formats, and no file is loaded whole."""

import json
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch

from halfbits import checkpoints
from halfbits.checkpoints import SCANNED_FORMATS, scan, summary, worst
from halfbits.formats import FORMATS, MXFP4, MXFP8, NVFP4

NAMES = {dtype: name for name, dtype in checkpoints._DTYPES.items()} | {torch.int8: "I8"}
BLOCKS = {"mxfp8": MXFP8, "mxfp4": MXFP4, "nvfp4": NVFP4}


def save(path, tensors, padding=b""):
    """Writes `tensors` as safetensors does: its package is no dependency of halfbits."""
    header = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        data += raw
    text = json.dumps(header).encode() + padding
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def hard_numbers():
    """[64, 96] in float32: random, subnormal and huge ones, and midpoints of formats."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-149, 128, [16, 96], generator=generator)
    wide = torch.ldexp(torch.randn(16, 96, generator=generator), exponents)
    near_one = torch.randn(32, 96, generator=generator)
    e4m3 = FORMATS["fp8_e4m3fn"].decode(np.arange(127))
    e2m1 = FORMATS["fp4_e2m1fn"].decode(np.arange(8))
    values = [*e4m3, *(e4m3[1:] + e4m3[:-1]) / 2, *e2m1, *(e2m1[1:] + e2m1[:-1]) / 2]
    values += [464, 464.0001, 7, 65519.99, 65520, 3.3961775e38, 3.4e38, 1e-45, 2**-25, 0, -0.0]
    ties = torch.tensor(values).repeat(6)[: 16 * 96].view(16, 96)
    return torch.cat([wide, near_one, ties]).clamp(-3.4e38, 3.4e38).float()


def expected(numbers, name):
    """(zeros, error) in the block format `name` by halfbits.formats."""
    rounded = BLOCKS[name].round(numbers).double()
    numbers = numbers.double()
    return int(((rounded == 0) & (numbers != 0)).sum()), norm(rounded - numbers) / norm(numbers)


def norm(numbers):
    return float(numbers.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8_e4m3fn", "fp4_e2m1fn"])
def test_numbers_are_rounded_as_the_format_rounds(name, dtype):
    form = FORMATS[name]
    numbers = hard_numbers().to(dtype)
    if dtype == torch.float64:
        numbers = numbers * (1 + 2.0**-40)  # too near to midpoints for float32
    numbers = numbers.clamp(-form.max, form.max)
    right = form.decode(form.encode(numbers))
    assert np.array_equal(checkpoints._nearest(numbers, form).double().numpy(), right)


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8_e4m3fn"])
@pytest.mark.parametrize("dtype", list(checkpoints._DTYPES.values()), ids=str)
def test_formats_without_a_scale_lose_what_encode_loses(name, dtype, tmp_path):
    numbers = hard_numbers()
    if dtype.itemsize == 1:
        numbers = numbers.clamp(-448, 448)
    numbers = numbers.to(dtype)
    if dtype == torch.float64:
        numbers = numbers * (1 + 2.0**-40)
    numbers = torch.where(numbers.double().isinf(), 0, numbers)
    table = scan(save(tmp_path / "model.safetensors", {"weight": numbers}), [name])
    values = numbers.double().numpy()
    rounded = FORMATS[name].decode(FORMATS[name].encode(values))
    stays = np.isfinite(rounded)
    error = np.linalg.norm((rounded - values)[stays]) / np.linalg.norm(values[stays])
    row = table.iloc[0]
    assert row["overflows"] == (~stays).sum()
    assert row["zeros"] == ((rounded == 0) & (values != 0)).sum()
    assert row["error"] == pytest.approx(error, rel=1e-9)
    assert row["dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("name", list(BLOCKS))
@pytest.mark.parametrize("scale", [1, 2.0**-120, 2.0**-140, 2.0**100], ids=str)
def test_block_formats_round_as_halfbits_formats_does(name, scale, monkeypatch):
    numbers = hard_numbers()[16:] * scale
    numbers = numbers.clamp(-3e38, 3e38)
    differences = []
    monkeypatch.setattr(checkpoints, "_squares", differences.append)
    recipe = checkpoints._RECIPES[name]
    checkpoints._losses(numbers, (0, 0.0), numbers.abs().max(), *recipe)
    right = numbers - BLOCKS[name].round(numbers)
    assert torch.equal(differences[0].view(numbers.shape), right)


@pytest.mark.parametrize("name", list(BLOCKS))
def test_a_tensor_is_laid_out_in_blocks(name, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "_CHUNK", 96)
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "matrix": [5, 200],
        "kernel": [4, 3, 5, 5],
        "vector": [40],
        "number": [],
        "odd": [3, 7],
    }
    tensors = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    table = scan(save(tmp_path / "a.safetensors", tensors), [name]).set_index("tensor")
    for key, tensor in tensors.items():
        matrix = tensor.reshape(tensor.shape[0] if tensor.dim() > 1 else 1, -1)
        padding = -matrix.shape[1] % BLOCKS[name].block_size
        zeros, error = expected(torch.nn.functional.pad(matrix, (0, padding)), name)
        assert table.loc[key, "zeros"] == zeros, key
        assert table.loc[key, "error"] == pytest.approx(error), key
        assert table.loc[key, "numbers"] == tensor.numel()
        assert table.loc[key, "dimensions"] == tensor.dim()


def test_what_is_cut_off_in_a_block_counts_as_an_overflow(tmp_path):
    block = torch.ones(1, 32)
    block[0, :4] = torch.tensor([7.9, 7.0, 6.9, -7.5])  # the scale of MXFP4 is 1, of MXFP8 2^-6
    table = scan(save(tmp_path / "a.safetensors", {"a": block}), ["mxfp4", "mxfp8", "nvfp4"])
    # 7.9 and -7.5 times 64 are past 464, 7 * 64 is 448.
    assert table["overflows"].tolist() == [3, 2, 0]


def test_one_scale_for_a_tensor_brings_its_largest_number_to_448(tmp_path):
    numbers = hard_numbers()[16:48] * 1e6
    table = scan(save(tmp_path / "a.safetensors", {"a": numbers}), ["fp8_e4m3fn", "fp8_scaled"])
    factor = 448 / numbers.abs().max()
    e4m3 = FORMATS["fp8_e4m3fn"]
    rounded = e4m3.decode(e4m3.encode(numbers * factor, saturate=True)) / float(factor)
    error = np.linalg.norm(rounded - numbers.double().numpy()) / norm(numbers)
    assert table["overflows"].tolist() == [(numbers.abs() > 464).sum(), 0]
    assert table["error"][1] == pytest.approx(error, rel=1e-6)
    tiny = torch.full([2, 2], 1e-20)  # the scale is not below 1e-12 / 448
    assert scan(save(tmp_path / "b.safetensors", {"b": tiny}), ["fp8_scaled"])["zeros"].item() == 4
    tiny *= 1e7
    assert scan(save(tmp_path / "c.safetensors", {"c": tiny}), ["fp8_scaled"])["zeros"].item() == 0


def test_parts_add_up_to_the_whole(tmp_path, monkeypatch):
    path = save(tmp_path / "a.safetensors", {"a": hard_numbers()[16:], "b": hard_numbers()[40]})
    whole = scan(path)
    monkeypatch.setattr(checkpoints, "_CHUNK", 64)
    calls = []
    pd.testing.assert_frame_equal(scan(path, progress=lambda *call: calls.append(call)), whole)
    done = [call[0] for call in calls]
    assert len(calls) == 48 * 2 + 2
    assert done == sorted(set(done))
    assert calls[-1] == (49 * 96 * 4, 49 * 96 * 4)


def test_inf_and_nan_are_counted_apart(tmp_path):
    numbers = torch.tensor([[1.0, 2.0, float("inf"), float("nan"), -float("inf"), 0.0]])
    table = scan(save(tmp_path / "a.safetensors", {"a": numbers, "zeros": torch.zeros(2, 2)}))
    assert set(table["nonfinite"][table["tensor"] == "a"]) == {3}
    assert table["overflows"].sum() == table["zeros"].sum() == 0
    assert table["error"][:7].eq(0).all()
    assert table["error"][7:].isna().all()


def test_the_summary_adds_squares_and_names_the_worst_tensor(tmp_path):
    generator = torch.Generator().manual_seed(2)
    tensors = {"large": torch.randn(8, 64, generator=generator), "huge": torch.ones(2, 64)}
    tensors["small"] = tensors["large"][:2] * 1e-7
    tensors["huge"][0, 0] = 1e5
    table = scan(save(tmp_path / "a.safetensors", tensors))
    row = summary(table).set_index("format").loc["fp16"]
    both = torch.cat([tensors["large"], tensors["small"]])
    noise = norm(both - both.half().float())
    assert list(summary(table)["format"]) == list(SCANNED_FORMATS)
    assert row["error"] == pytest.approx(noise / np.sqrt(norm(both) ** 2 + 127))
    assert (row["numbers"], row["overflows"], row["worst"]) == (768, 1, "huge")
    rest = table[(table["tensor"] != "huge") & (table["format"] == "fp16")]
    assert worst(rest)["tensor"].tolist() == ["small", "large"]
    assert list(worst(table, 1)["format"]) == list(SCANNED_FORMATS)
    assert row["zeros"] == rest["zeros"].sum()
    assert row["zeros"] > 0
    # What is cut off in MXFP8 is a part of its error, so it does not come first.
    cut_off = {"format": "mxfp8", "numbers": 10, "overflows": [5, 0], "error": [0.1, 0.2]}
    assert worst(pd.DataFrame({"tensor": ["a", "b"]} | cut_off))["tensor"].tolist() == ["b", "a"]


def test_a_folder_holds_the_shards_of_one_checkpoint(tmp_path):
    save(tmp_path / "model-00002-of-00002.safetensors", {"b": torch.ones(2)})
    save(tmp_path / "model-00001-of-00002.safetensors", {"a": torch.ones(2, 2)})
    assert scan(tmp_path, ["fp16"])["tensor"].tolist() == ["a", "b"]
    save(tmp_path / "model.fp16.safetensors", {"a": torch.ones(2, 2).half()})
    with pytest.raises(ValueError, match=r"two files in .* hold 'a': name one of them"):
        scan(tmp_path)


@pytest.mark.parametrize("new", [True, False])
def test_files_of_torch_save(new, tmp_path):
    numbers = hard_numbers()
    state = {
        "model": {"weight": numbers.t(), "step": torch.tensor(3)},
        "optimizer": {"state": {0: {"exp_avg": numbers.bfloat16()}}, "lr": 0.1},
    }
    torch.save(state, tmp_path / "model.pt", _use_new_zipfile_serialization=new)
    tensors = {"model.weight": numbers.t()}  # an optimizer's states are no weights
    table = scan(tmp_path / "model.pt")
    assert table.attrs["notes"] == [
        "Left out: int64 (tensors: 1, numbers: 1).",
        f"Left out: optimizer state (tensors: 1, numbers: {numbers.numel():,}).",
    ]
    pd.testing.assert_frame_equal(table, scan(save(tmp_path / "a.safetensors", tensors)))


def test_a_folder_in_which_a_shard_is_missing_is_refused(tmp_path):
    save(tmp_path / "a.safetensors", {"weight": torch.ones(2, 2)})
    index = {"weight_map": {"weight": "a.safetensors", "bias": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"names b.safetensors, which is not there"):
        scan(tmp_path)


def test_a_quantized_checkpoint_is_said_to_be_one(tmp_path):
    tensors = {
        "packed": torch.ones(4, 64, dtype=torch.int8),
        "scales": torch.ones(4, 1).half(),
        "fp8": torch.ones(4, 8).to(torch.float8_e4m3fn),
        "none": torch.ones(0, 3),
    }
    table = scan(save(tmp_path / "a.safetensors", tensors, padding=b" "), ["fp16"])
    assert table["tensor"].tolist() == ["scales", "fp8"]
    left_out, quantized, fp8 = table.attrs["notes"]
    assert left_out == "Left out: I8 (tensors: 1, numbers: 256)."
    assert "quantized already" in quantized
    assert "FP8" in fp8
    only = scan(save(tmp_path / "b.safetensors", {"packed": tensors["packed"]}))
    assert only.empty
    assert summary(only).empty


@pytest.mark.parametrize("length", [640, 19280])  # in bytes: b"\x80\x02" and b"PK"
def test_a_length_may_look_like_the_start_of_a_pickle(length, tmp_path):
    short = save(tmp_path / "a.safetensors", {"a": torch.ones(2)}).read_bytes()
    padding = b" " * (length - int.from_bytes(short[:8], "little"))
    path = save(tmp_path / "b.safetensors", {"a": torch.ones(2)}, padding)
    assert path.read_bytes().startswith((b"\x80\x02", b"PK"))
    assert scan(path, ["fp16"])["numbers"].item() == 2


def damaged(change):
    header = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    change(header["a"])
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"12345678"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.safetensors", b"", "is empty: download it again"),
        (
            "a.pt",
            b"version https://git-lfs.github.com/spec/v1\n",
            "Git LFS pointer, .*`git lfs pull`",
        ),
        ("a.safetensors", b"PK\x03\x04 and so on", "is a PyTorch file, .*: rename it to .pt"),
        ("a.safetensors", b"\x80\x02}q\x00.", "is a PyTorch file, .*: rename it to .pt"),
        ("a.safetensors", b"abc", "its header ends past the end"),
        ("a.safetensors", b"\x02" + bytes(7) + b"{]", "its header is no JSON object"),
        ("a.safetensors", b"\x02" + bytes(7) + b"12", "its header is no JSON object"),
        ("a.safetensors", b"\x02" + bytes(7) + b"\xff\xff", "its header is no JSON object"),
        ("a.safetensors", damaged(lambda a: a.pop("shape")), "its header is wrong about 'a'"),
        ("a.safetensors", damaged(lambda a: a.update(shape=[3])), "its header is wrong about 'a'"),
        ("a.safetensors", damaged(lambda a: a.update(data_offsets=[-8, 0])), "its header is wrong"),
        ("a.safetensors", damaged(lambda a: a.update(shape=2)), "its header is wrong about 'a'"),
        (
            "a.safetensors",
            damaged(lambda a: a.update(data_offsets=[0])),
            "its header is wrong about",
        ),
        (
            "a.safetensors",
            damaged(lambda a: a.update(data_offsets=[8, 16])),
            "'a' ends past the end",
        ),
        ("a.safetensors", damaged(lambda a: a.update(dtype=[])), "its header is wrong about 'a'"),
        ("a.pt", b"PK\x03\x04 and so on", "is no file of torch.save, or holds more than tensors"),
        ("a.gguf", b"GGUF", "scan reads .safetensors, .pt, .pth, .ckpt and .bin files"),
    ],
)
def test_what_is_no_checkpoint_is_refused_in_one_sentence(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        scan(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_objects_in_a_pickle_are_not_built(tmp_path):
    torch.save({"path": tmp_path}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="holds more than tensors"):
        scan(tmp_path / "a.pt")
    torch.save({"step": 3}, tmp_path / "b.pt")
    with pytest.raises(ValueError, match="holds no tensors"):
        scan(tmp_path / "b.pt")


def test_a_path_or_a_format_that_is_not_there(tmp_path):
    for path in (tmp_path / "model.safetensors", tmp_path):
        with pytest.raises(FileNotFoundError, match=re.escape(str(path))):
            scan(path)
    with pytest.raises(ValueError, match="'fp17': take one of fp16, bf16"):
        scan(tmp_path, ["fp17"])


def test_threads_are_as_they_were(tmp_path):
    threads = torch.get_num_threads()

    def interrupt(done, total):
        raise KeyboardInterrupt

    try:
        torch.set_num_threads(3)
        with pytest.raises(KeyboardInterrupt):
            scan(save(tmp_path / "a.safetensors", {"a": torch.ones(2)}), progress=interrupt)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


SCAN_WITHIN_A_LIMIT = """
import re, resource, sys
from pathlib import Path
from halfbits.checkpoints import scan
used = int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + 150 * 2**20,) * 2)
print(scan(sys.argv[1], ["fp16"])["numbers"].tolist())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can limit a process's own memory")
def test_large_tensors_are_not_loaded_whole(tmp_path):
    half = 200_000_000  # bytes
    header = {
        "matrix": {"dtype": "F32", "shape": [1000, 50_000], "data_offsets": [0, half]},
        "vector": {"dtype": "F32", "shape": [50_000_000], "data_offsets": [half, 2 * half]},
    }
    text = json.dumps(header).encode()
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 2 * half)  # the rest is zeros that take no room
    command = [sys.executable, "-c", SCAN_WITHIN_A_LIMIT, str(path)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.stdout == "[50000000, 50000000]\n", run.stderr
