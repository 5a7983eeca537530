"""Change one thing in a module of halfbits or helpers, and see whether its tests notice.

uv run python -m tools.mutants formats measure          # ten changes of each of these
uv run python -m tools.mutants --each 20                # twenty of every module

A mutant that no test kills is a line that the tests do not hold, or one that does not matter: look at each. Plain
numbers that only size or place something in a drawing, as `height=220`, and exercises' own cases are not changed. Works
in a copy; the share of mutants killed comes last.
"""

import argparse
import ast
import copy
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
TESTS = {  # others: test_NAME, and test_check for exercises
    "__init__": ["test_check", "test_progress"],
    "passed": ["test_progress"],
    "_fake": ["test_casts", "test_memory"],
    "_models": ["test_halfbits"],
    "_step": ["test_memory"],
    "cli": ["test_halfbits", "test_manual"],
    "errors": ["test_messages"],
    "speed": ["test_memory"],
    "ready": ["weekly/test_hosted"],
    "records": ["test_records"],
}
OPPOSITES = [
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.In, ast.NotIn),
    (ast.Is, ast.IsNot),
    (ast.Add, ast.Sub),
    (ast.Mult, ast.Div),
    (ast.And, ast.Or),
]
OPPOSITE = {one: other for pair in OPPOSITES for one, other in (pair, pair[::-1])}
LOOKS = re.compile(
    r".*(size|width|height|offset|padding|opacity|alpha|dash|radius)|d?[xy]|s|xytext|angle|thickness|zorder|jitter",
    re.IGNORECASE,
)


def changes(node):
    """What may be done to a node of the tree: functions that change it in place."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OPPOSITE:
        yield lambda node: node.ops.__setitem__(0, OPPOSITE[type(node.ops[0])]())
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OPPOSITE:
        yield lambda node: setattr(node, "op", OPPOSITE[type(node.op)]())
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield lambda node: setattr(node, "value", not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield lambda node: setattr(node, "value", another(node.value))
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield lambda node: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.Return) and node.value is not None:
        yield lambda node: setattr(node, "value", ast.Constant(None))


def another(number):
    """The next whole number; a float at least twice as large, for 1e9 + 1 is as good as 1e9."""
    return number + (max(1.0, abs(number)) if isinstance(number, float) else 1)


def data(tree):
    """The nodes of exercises' cases and mistakes, of functions that make them, and of tensors written beside them:
    another number makes another case or mistake, which is as good."""
    given = [node for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg in ("cases", "mistakes")]
    named = {node.id for keyword in given for node in ast.walk(keyword) if isinstance(node, ast.Name)}
    given += [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in named]
    if given:
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        given += [call for call in calls if ast.unparse(call.func) in ("torch.tensor", "torch.full")]
    return {id(node) for each in given for node in ast.walk(each)}


def looks(tree):
    """The nodes of plain numbers, and tuples and lists of them, that an argument or key of a name in LOOKS gives to a
    drawing: with one more it looks as good."""
    given = [(node.arg, node.value) for node in ast.walk(tree) if isinstance(node, ast.keyword)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            given += [(key.value, value) for key, value in zip(node.keys, node.values) if isinstance(key, ast.Constant)]
    plain = [value for name, value in given if LOOKS.fullmatch(str(name)) and is_plain(value)]
    return {id(node) for each in plain for node in ast.walk(each)}


def is_plain(node):
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def places(tree):
    """Where the tree can be changed: the number of a node, and of one of its changes."""
    spared = data(tree) | looks(tree)
    for place, node in enumerate(ast.walk(tree)):
        if id(node) not in spared:
            yield from ((place, number) for number, _ in enumerate(changes(node)))


def mutant(tree, place, number):
    """What differs, the line before and after, and the whole source."""
    other = copy.deepcopy(tree)
    node = list(ast.walk(other))[place]
    before = ast.unparse(node)
    list(changes(node))[number](node)
    after = ast.unparse(ast.fix_missing_locations(node))
    shown = [text.splitlines()[0] for text in (before, after)]
    return f"line {node.lineno}: {shown[0]}  ->  {shown[1]}", ast.unparse(ast.fix_missing_locations(other))


def tests_of(path):
    default = "test_check" if path.parent.name == "check" else f"test_{path.stem}"
    return [f"tests/{name}.py" for name in TESTS.get(path.stem, [default])]


def survives(path, source, folder):
    """Whether the tests of a helper pass although its source is this."""
    there = folder / path.relative_to(ROOT)
    original = there.read_text(encoding="utf-8")
    there.write_text(source, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", *tests_of(path)]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    try:
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=900)
        return result.returncode == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        there.write_text(original, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="names of modules; none: all")
    parser.add_argument("--each", type=int, default=10, help="how many mutants of each")
    options = parser.parse_args()
    paths = [*sorted(ROOT.glob("halfbits/*.py")), *sorted(ROOT.glob("helpers/**/*.py"))]
    paths = [path for path in paths if path.stem in options.modules or not options.modules]
    killed = tried = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "suite"
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "site", "__pycache__"))
        for path in paths:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found = list(places(tree))
            chosen = random.Random(path.stem).sample(found, min(options.each, len(found)))
            if chosen and not survives(path, ast.unparse(tree), folder):
                print(f"{path.relative_to(ROOT)}: its tests fail without a change too")
                continue
            for where in tqdm(chosen, desc=path.stem, leave=False):
                words, source = mutant(tree, *where)
                tried += 1
                if survives(path, source, folder):
                    tqdm.write(f"{path.relative_to(ROOT)}, {words}")
                else:
                    killed += 1
    print(f"{killed} of {tried} mutants were killed, {killed / max(1, tried):.0%}")


if __name__ == "__main__":
    main()
