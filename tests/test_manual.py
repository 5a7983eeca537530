"""docs/halfbits.md says what the commands print, and its Python runs as it stands."""

import doctest
import json
import re
import shlex

import pytest
import torch
from safetensors.torch import save_file

from halfbits import cli
from tools.execute import NOTEBOOKS

MANUAL = (NOTEBOOKS.parent / "docs" / "halfbits.md").read_text(encoding="utf-8")
CONSOLE = re.findall(r"^\$ (halfbits .*)\n((?:(?!\$ |```).*\n)*)", MANUAL, re.MULTILINE)
PYTHON = re.findall(r"^```python\n(.*?)^```", MANUAL, re.MULTILINE | re.DOTALL)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """What the manual's examples name: a checkpoint, and the configuration of a small language model."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    weights = {"embedding.weight": torch.randn(100, 64), "norm.weight": torch.ones(64)}
    save_file(weights, "model.safetensors")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "PATH_TO_CONFIG").mkdir()
    config = {"model_type": "llama", "vocab_size": 100, **sizes}
    (tmp_path / "PATH_TO_CONFIG" / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize(("command", "expected"), CONSOLE, ids=[command for command, _ in CONSOLE])
def test_a_command_prints_what_the_manual_says(command, expected, capsys):
    assert cli.main(shlex.split(command)[1:]) == 0
    said = capsys.readouterr().out
    assert doctest.OutputChecker().check_output(expected, said, FLAGS), said


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_its_python_runs(code):
    exec(code, {})


def test_every_command_is_shown():
    assert {command.split()[1] for command, _ in CONSOLE} == {"bits", "casts", "memory", "scan", "explain"}
    assert len(PYTHON) >= 6
