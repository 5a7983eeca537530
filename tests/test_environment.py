"""One list of dependencies, used by everything, and nothing in the repository that a fresh machine lacks."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, version
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from PIL import Image

from helpers import plots, ready, records
from tools import chart, hero, invented, links

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRA = PROJECT["project"]["optional-dependencies"]["notebooks"]
GROUPS = PROJECT["dependency-groups"]


def by_name(requirements):
    return {canonicalize_name(each.name): each for each in map(Requirement, requirements)}


RUNTIME = by_name(PROJECT["project"]["dependencies"])
FOR_NOTEBOOKS = RUNTIME | by_name(EXTRA)
IN_DEV = [requirement for requirement in GROUPS["dev"] if isinstance(requirement, str)]
FOR_TESTS = by_name([*GROUPS["site"], *GROUPS["networks"], *IN_DEV])
PINS = by_name(PROJECT["tool"]["uv"]["constraint-dependencies"])
OURS = {"halfbits", "helpers", "tests", "tools"}
MAGIC = re.compile(r"^%%\w+.*$", re.MULTILINE)


def imports(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.split(".")[0]


def sources(folder):
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield path.read_text(encoding="utf-8")
    for path in sorted((ROOT / folder).glob("*.ipynb")):
        yield "\n".join(c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code")


def written_modules(source):
    """The modules that a notebook writes itself, as scripts for torchrun."""
    return set(re.findall(r"^%%writefile (?:-a )?(\w+)\.py$", source, re.MULTILINE))


NEEDS = {
    "halfbits": RUNTIME,
    "helpers": FOR_NOTEBOOKS,
    "notebooks": FOR_NOTEBOOKS,
    "tests": FOR_NOTEBOOKS | FOR_TESTS,
    "tools": FOR_NOTEBOOKS | FOR_TESTS,
}


@pytest.mark.parametrize("folder", NEEDS)
def test_everything_imported_is_declared(folder):
    declared = set(NEEDS[folder])
    providers = packages_distributions()
    used = {n for source in sources(folder) for n in set(imports(MAGIC.sub("", source))) - written_modules(source)}
    used -= set(sys.stdlib_module_names) | OURS | {path.stem for path in (ROOT / folder).glob("*.py")}
    if folder == "helpers":
        used.remove("vl_convert")  # explore does without it where it is not there
    undeclared = {name for name in used if not declared & {canonicalize_name(d) for d in providers.get(name, [])}}
    assert not undeclared


def test_every_dependency_has_a_tested_version_within_its_range():
    for name, requirement in (FOR_NOTEBOOKS | FOR_TESTS).items():
        (pin,) = PINS[name].specifier
        assert pin.operator == "==" and requirement.specifier.contains(pin.version), name
        assert {s.operator for s in requirement.specifier} == {">="}, f"{name}: the range is wide"


def test_installed_versions_are_the_tested_ones():
    if Path(sys.prefix).resolve() != ROOT / ".venv":
        pytest.skip("this environment was not made by `uv run`, so it may have other versions than the tested ones")
    wrong = {name: version(name) for name, pin in PINS.items() if not pin.specifier.contains(version(name))}
    assert not wrong


def test_conda_environment_adds_nothing_of_its_own():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["channels"] == ["conda-forge"]
    assert environment["dependencies"] == [
        f"python{PROJECT['project']['requires-python']}",
        "pip",
        {"pip": ["-e .[notebooks]"]},
    ]


def tracked():
    try:
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a Git checkout")
    return listed.splitlines()


def test_top_level_is_the_agreed_one():
    folders = {path.split("/")[0] for path in tracked() if "/" in path}
    assert folders == {"notebooks", "halfbits", "helpers", "data", "tests", "tools", "docs", ".ci", ".github"}
    assert not [path for path in tracked() if Path(path).name in ("uv.lock", "requirements.txt", "poetry.lock")]


def test_links_to_hosted_platforms_are_written_for_an_address_and_replaced():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "colab.research" not in readme, "no address is invented"
    ours = links.linked(readme, "https://github.com/example/half-the-bits.git")
    opened = re.findall(r"https://colab\.research\.google\.com/github/example/half-the-bits/blob/main/([^)]+)\)", ours)
    assert sorted(opened) == [f"notebooks/{path.name}" for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    kaggle = "https://kaggle.com/kernels/welcome?src=https://github.com/example/half-the-bits/blob/main/"
    assert ours.count(kaggle) == len(opened)
    assert "`!git clone https://github.com/example/half-the-bits`" in ours
    assert links.linked(ours, "https://github.com/else/suite") == links.linked(readme, "https://github.com/else/suite")
    with pytest.raises(ValueError, match="is not of the form"):
        links.linked(readme, "git@github.com:example/half-the-bits")


def test_readme_shows_the_two_commands_first():
    code = re.findall(r"```\w*\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    commands = [line.split("#")[0].strip() for line in code[0].splitlines()]
    assert commands == ["pip install uv && uv run jupyter lab", "pip install uv && uv run pytest"]
    assert "pip install uv && uv run pytest" in (ROOT / ".ci" / "run").read_text()


def test_workflows_run_what_runs_here():
    for name, script in {"ci.yml": ".ci/run", "weekly.yml": ".ci/weekly"}.items():
        workflow = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())
        assert workflow["jobs"]["everything"]["steps"][-1]["run"] == script
    texts = [path.read_text() for path in [*(ROOT / ".ci").iterdir(), *(ROOT / ".github" / "workflows").iterdir()]]
    named = {name for text in texts for name in re.findall(r"tests/\w+\.py", text)}
    assert len(named) > 5
    assert all((ROOT / name).is_file() for name in named)


def test_what_a_notebook_installs_is_what_pyproject_asks_for():
    only_to_run_notebooks = {"ipython", "jupyterlab", "nbval"}
    needs = PROJECT["project"]["dependencies"] + EXTRA
    declared = {need for need in needs if Requirement(need).name not in only_to_run_notebooks}
    assert set(ready.NEEDS.split()) == declared
    assert ready.NETWORKS.split() == GROUPS["networks"]
    assert PROJECT["project"]["requires-python"] == ready.PYTHON


def modules_of(package):
    """The source of each module of a package, by its name."""
    folder = ROOT / package
    return {
        path.relative_to(folder).with_suffix("").as_posix().replace("/", "."): path.read_text(encoding="utf-8")
        for path in folder.rglob("*.py")
    }


@pytest.mark.parametrize("package", ["halfbits", "helpers"])
def test_every_public_name_is_used(package):
    """By a notebook, a tool, the manual, or another module that is; not by its tests alone."""
    users = {f"{folder}{at}": source for folder in ("notebooks", "tools") for at, source in enumerate(sources(folder))}
    users["manual"] = (ROOT / "docs" / "halfbits.md").read_text(encoding="utf-8")
    users |= modules_of("helpers")
    users |= {f"halfbits.{name}": source for name, source in modules_of("halfbits").items() if name != "__init__"}
    for name, source in modules_of(package).items():
        if name.startswith("check"):  # the exercises' names are in their list
            continue
        own = f"halfbits.{name}" if package == "halfbits" else name
        others = "\n".join(text for user, text in users.items() if user != own)
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                assert re.search(rf"\b{node.name}\b", others), f"{name}.{node.name}"


@pytest.mark.parametrize("package", ["halfbits", "helpers"])
def test_there_are_no_cycles(package):
    modules = modules_of(package)
    needs = {
        name: set(re.findall(rf"^from {package}(?:\.| import )([\w.]+)", text, re.MULTILINE)) & set(modules)
        for name, text in modules.items()
    }
    while ready_now := [name for name, others in needs.items() if not others & set(needs)]:
        for name in ready_now:
            del needs[name]
    assert not needs, f"import cycle among {sorted(needs)}"


def test_halfbits_needs_nothing_of_the_notebooks():
    assert "helpers" not in {name for source in sources("halfbits") for name in imports(source)}


BESIDE = pytest.param(True, id="beside invented records", marks=pytest.mark.weekly)


@pytest.mark.parametrize("beside", [pytest.param(False, id="alone"), BESIDE])
def test_notebook_07_judges_the_suite_s_records(beside, tmp_path, monkeypatch):
    """By its own cells, whatever records a reader has beside them."""
    monkeypatch.setenv("HALF_THE_BITS_SAVE_TO", str(tmp_path))
    if beside:
        invented.write(tmp_path)
    cells = nbformat.read(ROOT / "notebooks" / "07_fp32_vs_amp_experiment.ipynb", as_version=4).cells
    names = {"records": records, "plots": plots, "pd": pd, "np": np}
    for words in ("def compare(", "def seeds_needed(", "pairs = {", "trainings = []", "equal = ", "lambda_runs"):
        (source,) = [cell.source for cell in cells if cell.cell_type == "code" and words in cell.source]
        exec(source, names)
    assert names["seen"].high["Xeon: bf16 / FP32"] < 1.2
    assert len(names["trainings"]) == 19 and len(names["equal"]) == 13


def test_readme_s_chart_is_notebook_00_s():
    """`uv run python -m tools.chart` copies it."""
    assert "](docs/gains.png)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert chart.PICTURE.read_bytes() == chart.stored()[0]


def test_readme_s_picture_moves_and_can_be_read_as_a_still():
    """`uv run python -m tools.hero` makes it. In its first frame, the last of the runs, one row of four is noise."""
    path = ROOT / "docs" / "run_that_dies.gif"
    assert "](docs/run_that_dies.gif)" in (ROOT / "README.md").read_text(encoding="utf-8")
    picture = Image.open(path)
    assert path.stat().st_size < 2e6 and picture.n_frames > 15
    grey = np.asarray(picture.convert("L"), dtype=float) / 255
    rows = [grey[row.start : row.stop, hero.LEFT :] for row in hero.places()]
    off = {name: np.abs(row - rows[0]).mean() for name, row in zip(hero.NAMES, rows)}
    assert off["fp16"] > 5 * max(off[name] for name in hero.NAMES if name != "fp16")
