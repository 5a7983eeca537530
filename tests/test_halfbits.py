"""halfbits as people get it: its wheel works with torch and pandas alone, and so does its command line."""

import importlib
import io
import json
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import halfbits
from halfbits import cli

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_has_its_data_and_nothing_of_the_notebooks(wheel):
    files = ZipFile(wheel).namelist()
    assert "halfbits/errors.toml" in files
    assert {file.partition("/")[0] for file in files} == {"halfbits", "halfbits-0.1.0.dist-info"}
    assert {Path(file).name for file in files if file.startswith("halfbits/")} == {
        path.name for path in (ROOT / "halfbits").iterdir() if path.suffix in (".py", ".toml")
    }


def with_what_they_need(*packages):
    """The names of packages and of all that they ask for here."""
    found = set()
    waiting = list(packages)
    while waiting:
        name = waiting.pop()
        try:
            needs = requires(name) or []
        except PackageNotFoundError:  # for another platform
            continue
        found.add(canonicalize_name(name))
        asked = [need for need in map(Requirement, needs) if not need.marker or need.marker.evaluate({"extra": ""})]
        waiting += [need.name for need in asked if canonicalize_name(need.name) not in found]
    return found


ALONE = """
import sys

sys.path[:0] = sys.argv[1:]
import halfbits
assert halfbits.__file__.startswith(sys.argv[1]), halfbits.__file__
for name in halfbits.__all__:
    getattr(halfbits, name)
import torch
from halfbits import FORMATS, audit, cast_policies, explain, predict_memory, roofline, trace_casts, watch
from halfbits.cli import main

layer = torch.nn.Linear(4, 2)
assert FORMATS["fp16"].max == 65504
assert (trace_casts(layer, torch.ones(1, 4)).output == "float16").all()
assert len(cast_policies("cuda")) > 100
assert predict_memory(lambda: torch.nn.Linear(100, 1), (8, 100), "bf16").parameters == 404
assert roofline(lambda: torch.nn.Linear(64, 64), (8, 64), "fp16", "T4").bound == "memory"
assert "nothing wrong" in audit(layer).verdict
with watch(layer, save=None) as seen:
    layer(torch.ones(1, 4)).sum().backward()
assert len(explain("Attempting to unscale FP16 gradients.")) == 1
assert main(["bits", "0.1"]) == 0
"""


def test_the_wheel_works_with_torch_and_pandas_alone(wheel, tmp_path):
    """In a folder of links to these packages and what they need, without site-packages."""
    for name in with_what_they_need("torch", "pandas"):
        installed = distribution(name)
        for top in {file.parts[0] for file in installed.files if file.parts[0] not in ("..", "__pycache__")}:
            link = tmp_path / top
            if not link.exists():
                link.symlink_to(installed.locate_file(top))
    ZipFile(wheel).extractall(tmp_path)
    command = [sys.executable, "-I", "-S", "-c", ALONE, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "0x2e66" in done.stdout


def test_importing_halfbits_imports_nothing_else():
    code = "import sys, halfbits; print({'torch', 'numpy', 'pandas'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_every_public_name_is_there_and_others_are_not():
    for name, module in halfbits._MODULES.items():
        assert getattr(halfbits, name) is getattr(importlib.import_module(f"halfbits.{module}"), name)
    with pytest.raises(AttributeError, match=r"has no attribute 'amp_train'; it has .*trace_casts"):
        importlib.import_module("halfbits").amp_train  # noqa: B018


# The command line.


def answer(capsys, *arguments):
    """The exit status, what stands on standard output, and what on standard error."""
    status = cli.main(list(arguments))
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.fixture
def own_models(tmp_path, monkeypatch):
    """A module of somebody's own in the working folder."""
    code = """
import torch

def small():
    return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))

def with_inputs():
    return torch.nn.Bilinear(8, 8, 1), (torch.zeros(3, 8), torch.zeros(3, 8))

def broken():
    raise RuntimeError("no such weights")

class Asks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else x
"""
    (tmp_path / "own_models.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("own_models", None)


def test_bits_of_a_number_in_every_format(capsys):
    status, said, _ = answer(capsys, "bits", "0.1", "--json")
    assert status == 0
    rows = {row["format"]: row for row in json.loads(said)}
    assert list(rows) == list(halfbits.FORMATS)
    assert rows["fp16"]["sign exponent fraction"] == "0 01011 1001100110"
    assert rows["fp4_e2m1fn"]["rounding"] == "becomes 0"
    _, said, _ = answer(capsys, "bits", "70000")
    assert "overflows" in said and "cut off" in said


@pytest.mark.parametrize(
    ("number", "form", "value"),
    [("-1/3", "e4m3", "-0.34375"), ("-2^-3", "half", "-0.125"), ("0x3c00", "fp16", "1.0"), ("-inf", "bf16", "-inf")],
)
def test_a_number_as_one_types_it(capsys, number, form, value):
    _, said, _ = answer(capsys, "bits", number, "--format", form, "--json")
    assert json.loads(said)[0]["value"] == value


def test_casts_op_by_op_and_summed(capsys, own_models):
    _, said, _ = answer(capsys, "casts", "own_models:small", "--input", "2x8", "--ops", "--json")
    ops = json.loads(said)
    assert [row["op"] for row in ops if row["casts"]] == ["aten::addmm", "aten::addmm"]
    _, said, _ = answer(capsys, "casts", "own_models:small", "--input", "2x8", "--json")
    assert sum(row["times"] for row in json.loads(said)) == len(ops)
    _, said, _ = answer(capsys, "casts", "own_models:Asks", "--input", "2x8", "--device", "cpu", "--dtype", "bfloat16")
    assert "bfloat16" in said
    _, said, _ = answer(capsys, "casts", "own_models:small", "--input", "2x8", "--device", "xpu", "--json")
    assert {row["op"]: row["rule"] for row in json.loads(said)} == {"t": "none", "addmm": "lower", "relu": "none"}


def test_memory_in_three_precisions(capsys, own_models):
    status, said, _ = answer(capsys, "memory", "own_models:small", "--input", "1000x8", "--json")
    assert status == 0
    rows = {row["in"]: row for row in json.loads(said)}
    assert list(rows) == ["FP32", "autocast", "pure bf16"]
    assert rows["FP32"]["peak"] > rows["autocast"]["peak"]
    assert rows["autocast"]["peak"] > rows["pure bf16"]["peak"]
    assert rows["FP32"]["weights"] == 4 * (8 * 4 + 4 + 4 + 1)
    _, said, _ = answer(capsys, "memory", "own_models:with_inputs")
    assert "16 GB" in said


def test_memory_of_a_language_model(capsys, tmp_path):
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llama", "vocab_size": 100, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, said, problem = answer(capsys, "memory", f"hf:{tmp_path}", "--tokens", "2x32", "--json")
    assert status == 0, problem
    assert len(json.loads(said)) == 3


def test_explain_reads_an_argument_or_a_log(capsys, monkeypatch):
    status, said, _ = answer(capsys, "explain", "mat1 and mat2 must have the same dtype")
    assert status == 0
    assert "Why: A 16-bit tensor" in said and "Fix: " in said
    log = 'File "train.py", line 3\nValueError: Attempting to unscale FP16 gradients.\n'
    monkeypatch.setattr(sys, "stdin", io.StringIO(log))
    _, said, _ = answer(capsys, "explain", "--json")
    assert json.loads(said)[0]["slug"] == "attempting-to-unscale-fp16-gradients"
    status, said, _ = answer(capsys, "explain", "ZeroDivisionError: division by zero")
    assert status == 1
    assert "No message that is known" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bits", "one"], "'one' is not a number. Try 0.1"),
        (["bits", "0x3c00"], "say of which format"),
        (["bits", "0.1", "--format", "fp17"], "fp17"),
        (["bits", "0xfffff", "--format", "fp16"], "codes are integers from 0 to 0xffff"),
        (["casts", "resnet18"], "names no model"),
        (["casts", "timm:nosuchnet"], "timm has no model 'nosuchnet'"),
        (["casts", "nosuchmodule:make", "--input", "1x8"], "cannot be imported from this folder"),
        (["casts", "own_models:nosuch", "--input", "1x8"], "has no function 'nosuch'"),
        (["casts", "own_models:small"], "as --input"),
        (["casts", "own_models:small", "--input", "1x9"], "same reduction dim"),
        (["casts", "timm:resnet18", "--tokens", "1x8"], "instead of --tokens"),
        (["bits", "1e400"], "is too large"),
        (["bits", "1e-400"], "is too small"),
        (["scan", "own_models.py"], "scan reads .safetensors"),
        (["casts", "own_models:Asks", "--input", "2x8"], "--device cpu traces it on real tensors"),
        (["memory", "own_models:small", "--input", "8,8"], "'8,8' is no shape"),
        (["memory", "own_models:small", "--input", "2x8", "--optimizer", "adamx"], "unknown optimizer 'adamx'"),
        (["memory", "own_models:broken", "--input", "2x8"], "no such weights"),
        (["memory", "hf:nowhere", "--tokens", "1x8"], "does not exist"),
        (["scan", "nowhere.safetensors"], "nowhere.safetensors"),
        (["nonsense"], "nonsense"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_answered_by_one_sentence(capsys, own_models, arguments, words):
    if arguments[1:2] and arguments[1].startswith("timm"):
        pytest.importorskip("timm")
    if arguments[1:2] == ["hf:nowhere"]:
        pytest.importorskip("transformers")
    try:
        status = cli.main(arguments)
    except SystemExit as stop:
        status = stop.code
    said = capsys.readouterr()
    assert status == 2
    assert said.out == ""
    assert said.err.startswith("halfbits: ")
    assert words in said.err
    assert said.err.count("\n") == 1
    assert "Traceback" not in said.err


def test_the_version_is_the_project_s(capsys):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"halfbits {project['version']}\n"


def test_a_shell_finds_the_command():
    command = [str(Path(sys.executable).with_name("halfbits")), "bits", "1"]
    if not Path(command[0]).exists():
        command = [sys.executable, "-m", "halfbits.cli", "bits", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert "fp16" in done.stdout
