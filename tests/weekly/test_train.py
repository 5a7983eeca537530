"""notebooks/train.py saves, resumes, and goes on in another way of sharing the weights."""

import pytest

from helpers.launch import torchrun
from tools.execute import NOTEBOOKS

pytestmark = pytest.mark.weekly


@pytest.fixture
def trained(tmp_path):
    def run(processes, *arguments):
        script = tmp_path / "start.py"
        lines = ["import sys", f"sys.path.insert(0, {str(NOTEBOOKS)!r})", "import train"]
        script.write_text("\n".join([*lines, f"train.main({[str(tmp_path / 'run'), *arguments]!r})"]))
        launch = torchrun(script, processes=processes)
        assert launch.status == 0, launch.message
        return launch.printed

    return run


def test_a_run_resumes_with_other_processes_and_sharded(trained, tmp_path):
    first, second = trained(2, "--epochs", "1")
    assert first.startswith("2 processes, cpu, from step 1\n")
    assert second == "", "only rank 0 prints"
    assert (tmp_path / "run" / "step-000022" / ".metadata").is_file()
    assert (tmp_path / "run" / "weights.pt").is_file()

    (tmp_path / "run" / "step-000030").mkdir()  # not complete: without .metadata
    (printed,) = trained(1, "--epochs", "2", "--sharded")
    assert printed.startswith("1 processes, cpu, from step 23\n")
