"""What every Python that the tests start does first.

Imports make half a million objects that stay. The garbage collector goes through them again and again: a sixth of the
time of an import.
"""

import gc

gc.set_threshold(100_000)
