"""How a check replies: at once, in words, and never by raising."""

import functools
import math
import reprlib

from IPython.display import display

from helpers.check import progress_file

EXERCISES = {}  # the number of its notebook, by the name of the check, in the order of the notebooks


class _Wrong(Exception):
    """The whole reply to a call that gave no answer."""


def _asked(answer):
    """`answer`, with words for the calls that raise or return nothing; the first such call means an untouched stub."""
    calls = []

    def ask(*arguments):
        calls.append(arguments)
        shown = ", ".join(map(reprlib.repr, arguments))
        try:
            given = answer(*arguments)
        except (Exception, SystemExit) as error:
            raise _Wrong(
                f"Not right yet: called with {shown}, your code raised {type(error).__name__}: {error}"
            ) from None
        if given is not None and given is not ...:
            return given
        if len(calls) == 1:
            raise _Wrong("Not yet: your function returns None. Replace the dots by your code, with a return.")
        raise _Wrong(f"Not right yet: called with {shown}, your function returns None.")

    return ask


def says(check):
    """Make a check print its reply, and never raise: it returns None for a right answer, else what is wrong with it.

    That is a text, or a text and BitViews to draw below it: (text, view, ...). A right answer is noted as progress.
    """
    EXERCISES[check.__name__] = check.__module__[-2:]

    @functools.wraps(check)
    def reply(answer):
        try:
            wrong = check(_asked(answer))
        except _Wrong as words:
            print(words)
            return
        except Exception as error:  # the answer is of a kind that the check cannot even compare
            wrong = f"your function returns something unexpected ({type(error).__name__}: {error})"
        wrong, *views = wrong if isinstance(wrong, tuple) else (wrong,)
        print(f"Not right yet: {wrong}" if wrong else "Right.")
        for view in views:
            display(view)
        if not wrong:
            progress_file.note(check.__name__)

    return reply


def same(a, b):
    """Whether two numbers are equal, NaN and the sign of zero included."""
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
