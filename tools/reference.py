"""The environment in which stored outputs are made and compared: a CPU, two threads, no progress bars."""

import os
from pathlib import Path


def environment(save_to):
    """Environment variables of the reference run; its records and progress go to the folder `save_to`.

    Where tests run side by side each has one thread: two busy teams of threads on the same cores wait for each other.
    """
    threads = "1" if "PYTEST_XDIST_WORKER" in os.environ else "2"
    return {
        "HALF_THE_BITS_DEVICE": "cpu",
        "HALF_THE_BITS_SAVE_TO": str(save_to),
        "HALF_THE_BITS_PROGRESS": str(Path(save_to) / "progress"),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "PYTHONDONTWRITEBYTECODE": "",  # compiling torch's modules anew would double the time of each import
        "PYTHONHASHSEED": "0",
        # About this machine's Python, not about a notebook: 3.13.0 makes compiled models slower, and from 3.12 on a
        # package with an escape like "\." warns once, when it is imported for the first time.
        "PYTHONWARNINGS": "ignore:Guards may run slower:RuntimeWarning,ignore::SyntaxWarning",
        "TQDM_DISABLE": "1",
    }
