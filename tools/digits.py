"""The digits in data/digits, as scikit-learn brings them: `uv run python -m tools.digits` writes them again."""

from pathlib import Path

import cv2
import numpy as np
import pandas as pd
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from helpers import DATA


def write_digits(folder, side=32):
    """Write scikit-learn's 1,797 handwritten digits as JPEG files with `train.csv` and `held_out.csv`.

    The label says whether the digit is odd. A fifth of each digit is held out. Source: E. Alpaydin and C. Kaynak,
    Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998, doi:10.24432/C50P49.
    """
    folder = Path(folder)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    names = [f"{i:04d}.jpg" for i in range(len(digits.target))]
    for name, pixels in zip(names, digits.images):
        grey = np.round(pixels * 255 / 16).astype(np.uint8)
        image = cv2.resize(grey, (side, side), interpolation=cv2.INTER_CUBIC)
        cv2.imwrite(str(folder / "images" / name), image, [cv2.IMWRITE_JPEG_QUALITY, 90])
    table = pd.DataFrame({"image": names, "path": "images", "label": digits.target % 2, "digit": digits.target})
    train, held_out = train_test_split(table, test_size=0.2, stratify=table.digit, random_state=0)
    train.sort_index().to_csv(folder / "train.csv", index=False, lineterminator="\n")
    held_out.sort_index().to_csv(folder / "held_out.csv", index=False, lineterminator="\n")


if __name__ == "__main__":
    write_digits(DATA / "digits")
