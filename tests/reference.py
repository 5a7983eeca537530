"""The environment in which stored outputs are made and compared: a CPU, two threads, no progress bars."""


def environment(save_to):
    """Environment variables of the reference run; records made in it go to the folder `save_to`."""
    return {
        "HALF_THE_BITS_DEVICE": "cpu",
        "HALF_THE_BITS_SAVE_TO": str(save_to),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2",
        "PYTHONHASHSEED": "0",
        "TQDM_DISABLE": "1",
    }
