"""Run a script in several processes with torchrun, and leave none of them behind."""

import os
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Launch:
    """What a run of torchrun left.

    `status`: its exit status. `printed`: for each rank all that it printed; a process that was restarted goes on where
    the one before it ended. `errors`: for each rank the last line of its error output. `message`: the last error that
    torchrun itself reported, on one line, or else its last words; "" if it ended well.
    """

    status: int
    printed: list
    errors: list
    message: str

    def __str__(self):
        lines = [f"rank {rank}: {line}" for rank, text in enumerate(self.printed) for line in text.splitlines()]
        return "\n".join([*lines, *([f"failed: {self.message}"] if self.status else [])])


def torchrun(script, *arguments, processes=2, options=("--standalone",), timeout=120):
    """Run `torchrun OPTIONS --nproc-per-node PROCESSES SCRIPT ARGUMENTS` to its end; what it left, as a Launch.

    `--standalone` is one machine, by the name localhost, and a free port. The processes share the cores evenly, and
    print without colours. If `timeout` seconds pass, or the notebook's stop button is pressed, torchrun and all that
    it started are killed. Raises TimeoutError, with torchrun's last words, in the first case, FileNotFoundError for a
    script that is not there, and ValueError for less than one process and for options that are one string.

    Examples
    --------
    >>> torchrun("train.py", processes=2).printed  # doctest: +SKIP
    """
    if not Path(script).is_file():
        raise FileNotFoundError(f"no script {script}; run the cell that writes it first")
    if isinstance(options, str):
        raise ValueError(f"options is the string {options!r}; a tuple of one has a comma: ({options!r},)")
    if processes < 1:
        raise ValueError(f"processes is {processes}; a run needs 1 or more")
    # torchrun would look up the machine's own name, and wait for minutes where no network knows it.
    here = ["--local-addr=localhost"] if "--standalone" in options else []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as logs:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", *here, *options]
        command += ["--log-dir", logs, "--redirects", "3", str(script), *map(str, arguments)]
        threads = max(1, psutil.cpu_count() // processes)  # else each takes all cores, and they wait for each other
        # A notebook's kernel sets FORCE_COLOR: errors would come with the codes of colours in them.
        plain = {"PYTHON_COLORS": "0", "NO_COLOR": "1"}
        variables = os.environ | plain | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        variables |= {"HALF_THE_BITS_LAUNCH": logs}  # all that it starts inherit it
        report = Path(logs) / "report"
        with report.open("w") as file:
            agent = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=file, env=variables)
        try:
            status = agent.wait(timeout)
        except psutil.TimeoutExpired:
            said = report.read_text(errors="replace").strip().rpartition("\n")[2] or "nothing"
            late = f"{script} had not ended after {timeout} s; all its processes were killed"
            raise TimeoutError(f"{late}. torchrun's last words: {said}") from None
        finally:
            _end(agent, logs)
        printed, errors = ([_read(logs, rank, name) for rank in range(processes)] for name in ("stdout", "stderr"))
        said = report.read_text(errors="replace").strip()
        raised = re.findall(r"^[\w.]*(?:Error|Exception)\b.*", said, re.MULTILINE)
    last = said.rpartition("\n")[2] or f"torchrun ended with status {status}"
    message = (raised or [last])[-1] if status else ""
    return Launch(status, printed, [error.strip().rpartition("\n")[2] for error in errors], message)


def _read(logs, rank, name):
    files = sorted(Path(logs).glob(f"*/attempt_*/{rank}/{name}.log"))
    return "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)


def _end(agent, logs):
    """Kill the process and all that it started, which bear the name of its logs, and wait until they are gone."""
    family = [agent]
    with suppress(psutil.NoSuchProcess):  # it may be gone, and its children with it, or without
        family += agent.children(recursive=True)
    family += [one for one in psutil.process_iter(["environ"]) if logs in (one.info["environ"] or {}).values()]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=10)
