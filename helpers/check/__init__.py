"""Checks of a reader's answers. Each prints at once what is wrong, or that the answer is right; none ever raises.

And `diagnose`, which watches training steps, and `progress`, a table of the exercises passed.
"""

from helpers.check import progress_file as _progress_file
from helpers.check.diagnosis import diagnose
from helpers.check.notebook_01 import decode_fp16, encode_fp16, limits
from helpers.check.notebook_02 import kahan_sum, rms, smallest_step
from helpers.check.notebook_03 import largest_scale, next_state
from helpers.check.notebook_04 import paste, rms_norm
from helpers.check.notebook_05 import accumulated_step, clipped_step
from helpers.check.notebook_06 import batch_that_fits, best_time, kept_bytes
from helpers.check.notebook_07 import bf16_step, verdict
from helpers.check.notebook_08 import mean_loss, read_batch, to_float01
from helpers.check.notebook_09 import bytes_sent, mean_over_processes, shard
from helpers.check.notebook_10 import optimizer_steps, translate, unscale_and_clip
from helpers.check.notebook_11 import block_exponent, next_scale, to_e5m2
from helpers.check.notebook_12 import case_of, first_bad, mended_step
from helpers.check.replies import EXERCISES as _EXERCISES


def progress():
    """A table of this reader's progress, one row a notebook: exercises passed, and which are still to do."""
    return _progress_file.table(_EXERCISES)
