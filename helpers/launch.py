"""Run a script in several processes with torchrun, and leave none of them behind."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class _Launch:
    """What a run of torchrun left."""

    status: int
    printed: list[str]
    errors: list[str]
    message: str

    def __str__(self):
        lines = []
        for rank, text in enumerate(self.printed):
            lines += [f"rank {rank}: {line}" for line in text.splitlines()]
        if self.status:
            lines.append(f"failed: {self.message}")
        return "\n".join(lines)


def torchrun(
    script: str | Path,
    processes: int = 2,
    options: Sequence[str] = ("--standalone",),
    timeout: float = 120,
) -> _Launch:
    """Run `torchrun OPTIONS --nproc-per-node PROCESSES SCRIPT` to its end.

    Returns its exit `status`; for each rank all that it `printed`, also before a restart, and the
    last line of its `errors`; and a `message`, why the run failed, or "" if it ended well.

    `--standalone` is one machine, by the name localhost, and a free port. The processes share the
    cores evenly, and print without colours. If `timeout` seconds pass, or the notebook's stop
    button is pressed, torchrun and all that it started are killed. Raises TimeoutError in the first
    case, and FileNotFoundError for a script that is not there.

    Examples
    --------
    >>> torchrun("train.py", processes=2).printed  # doctest: +SKIP
    """
    if not Path(script).is_file():
        raise FileNotFoundError(f"no script {script}; run the cell that writes it first")
    # torchrun would look up the machine's own name, and wait for minutes where no network knows it.
    here = ["--local-addr=localhost"] if "--standalone" in options else []
    threads = str(max(1, psutil.cpu_count() // processes))  # else each process takes all cores
    variables = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as logs:
        variables |= {"NO_COLOR": "1", "HALF_THE_BITS_LAUNCH": logs}
        command = [sys.executable, "-m", "torch.distributed.run", "--log-dir", logs]
        command += ["--redirects=3", f"--nproc-per-node={processes}", *here, *options, str(script)]
        report = Path(logs, "report")
        try:
            with report.open("w") as file:
                quiet = {"stdout": subprocess.DEVNULL, "stderr": file}
                agent = subprocess.run(command, env=variables, timeout=timeout, **quiet)
        except subprocess.TimeoutExpired:
            late = f"{script} had not ended after {timeout} s; all its processes were killed"
            raise TimeoutError(late) from None
        finally:
            _kill_all_of(logs)
        printed = [_read(logs, rank, "stdout") for rank in range(processes)]
        errors = [_last_line(_read(logs, rank, "stderr")) for rank in range(processes)]
        said = _last_line(report.read_text(errors="replace"))
    message = next(filter(None, errors), said) if agent.returncode else ""
    return _Launch(agent.returncode, printed, errors, message)


def _last_line(text):
    return text.strip().rpartition("\n")[2]


def _read(logs, rank, name):
    files = sorted(Path(logs).glob(f"*/attempt_*/{rank}/{name}.log"))
    return "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)


def _kill_all_of(logs):
    """Kill torchrun and all that it started, whose environment names its logs, and wait."""
    family = []
    for process in psutil.process_iter(["environ"]):
        if logs in (process.info["environ"] or {}).values():
            family.append(process)
            with suppress(psutil.NoSuchProcess):
                process.kill()
    psutil.wait_procs(family, timeout=10)
