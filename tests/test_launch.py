"""torchrun's processes are seen, and none of them is left, however the run ends."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from helpers.launch import torchrun

SLEEP = "import time\nprint('here', flush=True)\ntime.sleep(600)"


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A function that writes a script and returns its path. Temporary files go to an own folder."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)

    def write(source):
        path = tmp_path / "script.py"
        path.write_text(source)
        return path

    yield write
    assert not processes_of(tmp_path)
    assert not list((tmp_path / "temporary").iterdir())


def processes_of(folder):
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(folder) in " ".join(process.info["cmdline"] or [])
    ]


def test_each_rank_prints_for_itself_and_has_its_share_of_the_cores(script):
    path = script("import os\nprint(*map(os.getenv, ('RANK', 'WORLD_SIZE', 'OMP_NUM_THREADS')))")
    launch = torchrun(path)
    threads = max(1, psutil.cpu_count() // 2)
    lines = [f"{rank} 2 {threads}" for rank in (0, 1)]
    assert launch.printed == [f"{line}\n" for line in lines]
    assert (launch.status, launch.errors, launch.message) == (0, ["", ""], "")
    assert str(launch) == f"rank 0: {lines[0]}\nrank 1: {lines[1]}"


def test_an_error_in_one_process_ends_all_and_is_told(script):
    path = script(f"import os\nif os.environ['RANK'] == '1': raise ValueError('on purpose')\n{SLEEP}")
    launch = torchrun(path)
    assert launch.status != 0
    assert launch.errors[1] == "ValueError: on purpose"
    assert launch.message == launch.errors[1] and "failed: ValueError: on purpose" in str(launch)


@pytest.mark.weekly
def test_what_torchrun_itself_refuses_is_told(script):
    launch = torchrun(script(""), options=("--standalone", "--max-restarts=x"))
    assert launch.status != 0 and "invalid int value: 'x'" in launch.message


# What Python does from 3.13 on, for the Pythons before it.
COLOURS = """
import os, sys
if sys.version_info < (3, 13) and "FORCE_COLOR" in os.environ and "NO_COLOR" not in os.environ:
    sys.excepthook = lambda kind, error, _: print(f"\033[1;35m{kind.__name__}\033[0m: {error}", file=sys.stderr)
"""


@pytest.mark.weekly
def test_errors_are_read_where_colours_are_asked_for(script, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    launch = torchrun(script(f"{COLOURS}\nraise ValueError('on purpose')"), processes=1)
    assert launch.errors == ["ValueError: on purpose"]


@pytest.mark.weekly
def test_a_restarted_process_goes_on_where_it_ended(script):
    path = script("import os\ncount = os.environ['TORCHELASTIC_RESTART_COUNT']\nprint(count)\nassert count == '1'")
    launch = torchrun(path, processes=1, options=("--standalone", "--max-restarts=1"))
    assert (launch.status, launch.printed) == (0, ["0\n1\n"])


CHILD = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", os.getcwd()])
"""


@pytest.mark.weekly
def test_a_run_that_takes_too_long_is_ended_with_all_that_it_started(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TimeoutError, match="had not ended after 8 s"):
        torchrun(script(CHILD + SLEEP), processes=1, timeout=8)


@pytest.fixture
def started_first(tmp_path, monkeypatch):
    """A function that makes every Python started from now on run this code first."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return (tmp_path / "sitecustomize.py").write_text


@pytest.mark.weekly
def test_a_machine_whose_own_name_no_network_knows_runs(script, started_first):
    started_first("import socket; socket.getfqdn = lambda *_: 'no-such-host.invalid'")
    launch = torchrun(script("import os\nprint(os.environ['MASTER_ADDR'])"), processes=1, timeout=60)
    assert launch.printed == ["localhost\n"]


KILLS_TORCHRUN = "import signal\nos.kill(os.getppid(), signal.SIGKILL)\n"


@pytest.mark.weekly
def test_where_torchrun_itself_is_killed_its_processes_are_ended(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert torchrun(script(CHILD + KILLS_TORCHRUN + SLEEP), processes=1).status == -signal.SIGKILL


@pytest.mark.weekly
def test_an_interrupted_run_leaves_nothing(script, tmp_path):
    path = script(SLEEP)
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a shell's & turns it off
    code = f"{listen}; from helpers.launch import torchrun; torchrun({str(path)!r})"
    caller = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not any(file.read_text() for file in tmp_path.rglob("stdout.log")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(processes_of(tmp_path)) >= 4, "the caller, torchrun, and two processes"
    caller.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in caller.communicate(timeout=30)[1].decode()


def test_a_missing_script_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.py; run the cell that writes it first"):
        torchrun(tmp_path / "nothing.py")
