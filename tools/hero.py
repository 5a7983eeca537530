"""Draw README's picture: digits appear step by step in four rows, while one row stays noise.

uv run python -m tools.hero

It trains with the cells of notebook 00, as long as each frame says, and writes docs/run_that_dies.gif. The last frame
stands first, so that a page that does not move shows how it ends.
"""

import nbformat
import torch
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

from helpers.plots import color_of
from tools.execute import NOTEBOOKS

PICTURE = NOTEBOOKS.parent / "docs" / "run_that_dies.gif"
NAMES = ["original", "FP32", "fp16", "fp16 + GradScaler", "bf16"]
STEPS = [0, 2, 4, 6, 8, 10, 13, 16, 20, 25, 30, 37, 45, 55, 70, 90, 120, 160, 220, 300]
SIDE, GAP, LEFT, TOP = 96, 14, 300, 56  # pixels, twice as many as the page has


def places():
    """The rows of the picture, as ranges of y."""
    return [range(TOP + row * (SIDE + GAP), TOP + row * (SIDE + GAP) + SIDE) for row in range(len(NAMES))]


def frame(rows, step):
    """One picture: five rows of ten digits, each a tensor (10, 8, 8) in [0, 1], under the number of the step."""
    picture = Image.new("RGB", (LEFT + 10 * (SIDE + GAP), TOP + len(rows) * (SIDE + GAP)), "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(size=30)
    draw.text((LEFT, 8), f"after {step} steps", "#555555", font)
    for (name, digits), place in zip(rows.items(), places()):
        draw.text((LEFT - 16, place.start + SIDE / 2), name, color_of(name), font, anchor="rm")
        for column, digit in enumerate(digits):
            grey = Image.fromarray((255 * (1 - digit.clamp(0, 1))).byte().numpy())
            picture.paste(
                grey.resize((SIDE, SIDE), Image.Resampling.NEAREST), (LEFT + column * (SIDE + GAP), place.start)
            )
    return picture


def main():
    cells = nbformat.read(NOTEBOOKS / "00_start_here.ipynb", as_version=4).cells
    names = {}
    for words in ("unseen = pixels", "def train("):
        (source,) = [cell.source for cell in cells if cell.cell_type == "code" and words in cell.source]
        exec(source.replace("range(300)", "range(steps)"), names)
    ways = {"FP32": {}, "fp16": {"dtype": torch.float16}, "bf16": {"dtype": torch.bfloat16}}
    ways["fp16 + GradScaler"] = {"dtype": torch.float16, "scaled": True}
    frames = []
    for steps in tqdm(STEPS, desc="Frames"):
        names["steps"] = steps
        rows = {"original": names["unseen"].view(-1, 8, 8)}
        for name in NAMES[1:]:
            network = names["train"](**ways[name])[0]
            rows[name] = network(names["unseen"]).view(-1, 8, 8).detach().cpu()
        frames.append(frame(rows, steps).quantize(256, dither=Image.Dither.NONE))
    last = frames.pop()
    times = [3000, *(250 for _ in frames)]
    last.save(PICTURE, save_all=True, append_images=frames, duration=times, loop=0, optimize=True)


if __name__ == "__main__":
    main()
