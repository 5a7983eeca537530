"""The engine of all exercises: it calls an answer, compares, and replies at once, in a box. It never raises.

An exercise is data: a reference, the cases that it is called with, and the mistakes that people make, each a program
that makes it, under the hint that helps. Where an answer differs from the reference, the first mistake that has given
the same in all cases so far says which hint to give.
"""

import copy
import functools
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

import torch
from IPython.display import display

from helpers.check import passed
from helpers.plots import COLORS, NEUTRAL


class Case(NamedTuple):
    """The arguments of one call, and what to think of where no known mistake explains the answer."""

    arguments: tuple
    hint: str = ""


class Reply(Exception):
    """What is wrong with an answer: raised by `observe` where there is nothing to compare."""


class Untouched(Exception):
    """The first call returned nothing."""


class Box:
    """What an exercise replies: a line of words; in a notebook in a box, with a tick, a cross or, untried, a circle."""

    RIGHT = "\N{CHECK MARK}", COLORS["normal"]
    WRONG = "\N{MULTIPLICATION X}", COLORS["becomes 0"]
    OPEN = "\N{WHITE CIRCLE}", NEUTRAL

    def __init__(self, kind, words):
        self.kind, self.words = kind, words

    def __repr__(self):
        return self.words

    def _repr_html_(self):
        mark, color = self.kind
        style = f"border-left:5px solid {color};padding:.3em .8em;overflow-wrap:anywhere"
        return f'<div style="{style}"><b style="color:{color}">{mark}</b> {escape(self.words)}</div>'


def called(answer, *arguments):
    """What `answer` gives for copies of `arguments`: how most exercises observe an answer."""
    return answer(*copy.deepcopy(arguments))


def equal(given, right, rel=0.0):
    """Whether two results are the same. Numbers and tensors may differ by `rel`; NaN equals NaN, 0.0 is not -0.0."""
    if isinstance(right, dict):
        return all(equal(given[name], value, rel) for name, value in right.items())
    if isinstance(right, (tuple, list)):
        return len(given) == len(right) and all(equal(*pair, rel) for pair in zip(given, right))
    if isinstance(right, torch.Tensor):
        return _form(given) == _form(right) and torch.allclose(given, right, rtol=rel, atol=0, equal_nan=True)
    if isinstance(right, str | torch.dtype | None) or isinstance(given, str | None):
        return given == right
    if rel or math.isnan(right):
        return math.isclose(given, right, rel_tol=rel) or (math.isnan(given) and math.isnan(right))
    return bool(given == right and math.copysign(1, given) == math.copysign(1, right))


def _form(value):
    """What must agree before numbers are compared: the dtype and the shape of a tensor, or what else a value is."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return f"{len(value)} values" if isinstance(value, (tuple, list)) else f"{type(value).__name__}, {shown(value)}"


def shown(value):
    """`value` in a few words: a large tensor as its form, a long float with six digits."""
    if isinstance(value, torch.Tensor):
        return shown(value.tolist()) if value.numel() <= 8 else f"a tensor, {_form(value)}"
    if isinstance(value, float):
        return repr(value) if len(repr(value)) <= 12 else f"{value:.6g}"
    if isinstance(value, (tuple, list)):
        parts = ", ".join(map(shown, value[:8])) + (", ..." if len(value) > 8 else "")
        return f"({parts})" if isinstance(value, tuple) else f"[{parts}]"
    if isinstance(value, int | str | dict | torch.dtype | None):
        return str(value)
    return getattr(value, "__name__", type(value).__name__)


@dataclass
class Exercise:
    """One exercise. Called with an answer, it shows its reply, and notes a right one as progress.

    Parameters
    ----------
    reference : callable
        The right answer, with the name and the docstring of the exercise.
    cases : sequence of `Case`, or of tuples of arguments; or a function that returns one
        Tried in order, until one goes wrong.
    mistakes : dict of str to callable
        Answers that people give, by the hint that names the mistake.
    observe : callable
        `observe(answer, *arguments)` is what is compared: a number, text, tensor or tuple, or a dict of these by words
        that say what each is. It may raise `Reply`.
    same : callable
        `same(given, right)`, whether two such observations agree.
    show : callable
        `show(*arguments)` puts a call into words.
    draw : callable
        `draw(given, right, *arguments)` are the pictures below a wrong answer.

    Examples
    --------
    >>> @exercise(cases=[(2.0,), (3.0,)], mistakes={"Multiply it by itself, not by 2.": lambda x: 2 * x})
    ... def square(x):
    ...     return x * x
    >>> square(lambda x: x + x)
    Not right yet: for 3.0 your result is 6.0; it should be 9.0. Multiply it by itself, not by 2.
    """

    reference: Callable
    cases: Sequence | Callable
    mistakes: dict = field(default_factory=dict)
    observe: Callable = called
    same: Callable = equal
    show: Callable = lambda *arguments: ", ".join(map(shown, arguments))
    draw: Callable = lambda *_: ()

    def __post_init__(self):
        functools.update_wrapper(self, self.reference)

    def __call__(self, answer):
        views = ()
        try:
            wrong, views = self._first_wrong(_asked(answer))
            box = Box(Box.WRONG, f"Not right yet: {wrong}") if wrong else Box(Box.RIGHT, f"Right. {self._noted()}")
        except Untouched:
            words = "Not yet: your function returns None. Replace the dots by your code, with a return."
            box = Box(Box.OPEN, words)
        except Reply as reply:
            box = Box(Box.WRONG, f"Not right yet: {reply}")
        except Exception as error:  # the answer is of a kind that cannot even be compared
            kind = f"{type(error).__name__}: {error}"
            box = Box(Box.WRONG, f"Not right yet: your function returns something unexpected ({kind})")
        for each in (box, *views):
            display(each)

    def _noted(self):
        """Note a right answer; how many are right of the notebook's, which are those of its module."""
        right = passed.note(self.__name__)
        mine = [each for each in vars(sys.modules[self.__module__]).values() if isinstance(each, Exercise)]
        return f"{sum(each.__name__ in right for each in mine)} of {len(mine)} in this notebook."

    def _first_wrong(self, ask):
        """The reply to the first case that goes wrong, and the pictures below it; None and none if all go well."""
        seen = []  # the arguments of each case so far, and what the answer gave
        for case in self.cases() if callable(self.cases) else self.cases:
            arguments, hint = case if isinstance(case, Case) else Case(case)
            right, given = self.observe(self.reference, *arguments), self.observe(ask, *arguments)
            seen.append((arguments, given))
            if not self._agree(given, right):
                hint = next((words for words, mistake in self.mistakes.items() if self._gives(mistake, seen)), hint)
                call = self.show(*arguments)
                where = f"for {call} " if call else ""
                words = f"{where}{_difference(given, right, self.same)}. {hint}".rstrip()
                return words, self.draw(given, right, *arguments)
        return None, ()

    def _agree(self, given, right):
        return _is_of_the_form(given, right) and (equal(given, right) or bool(self.same(given, right)))

    def _gives(self, mistake, seen):
        """Whether a mistake gives what the answer gave, in all cases so far."""
        try:
            return all(self._agree(given, self.observe(mistake, *arguments)) for arguments, given in seen)
        except Exception:  # it fails in another way
            return False


def exercise(**parts: Any):
    """A decorator: the function below it is the reference of an `Exercise` of these parts."""
    return functools.partial(Exercise, **parts)


def _is_of_the_form(given, right):
    """Whether `given` can be compared with `right`: as many values, or a tensor of the same dtype and shape."""
    if isinstance(right, tuple):
        return isinstance(given, (tuple, list)) and len(given) == len(right)
    return not isinstance(right, torch.Tensor) or _form(given) == _form(right)


def _difference(given, right, same):
    """What differs, in words."""
    what = "your result"
    if isinstance(right, dict):
        what = next(name for name in right if not same({name: given[name]}, {name: right[name]}))
        given, right = given[what], right[what]
    if not _is_of_the_form(given, right):
        return f"{what} is {_form(given)}; it should be {_form(right)}"
    if isinstance(right, torch.Tensor) and right.numel() > 8:
        return f"{what} is off by up to {shown((given.double() - right.double()).abs().max().item())}"
    return f"{what} is {shown(given)}; it should be {shown(right)}"


def _asked(answer):
    """`answer`, with words for the calls that raise or return nothing; the first such call means an untouched stub."""
    calls = []

    def ask(*arguments):
        calls.append(arguments)
        call = ", ".join(map(shown, arguments))
        try:
            given = answer(*arguments)
        except (Exception, SystemExit) as error:
            where = _line_of(answer, error)
            raise Reply(f"called with {call}, your code raised {type(error).__name__}: {error}{where}") from None
        if given is not None and given is not ...:
            return given
        if len(calls) == 1:
            raise Untouched
        raise Reply(f"called with {call}, your function returns None.")

    return ask


def _line_of(answer, error):
    """The line of the answer's own file or cell in which it failed, in words; nothing where there is none."""
    file = getattr(getattr(answer, "__code__", None), "co_filename", None)
    lines = [frame.line for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f", in the line `{lines[-1]}`" if lines and lines[-1] else ""
