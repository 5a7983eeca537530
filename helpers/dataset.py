"""Images and labels from a CSV file, checked before training starts.

The CSV has three columns: `image` (a file name), `path` (its folder, absolute or relative to the
CSV) and `label` (0 or 1; with more classes a whole number from 0). Others are kept and ignored.
"""

import os
from pathlib import Path

import cv2
import numpy as np
import pandas as pd
import torch
from sklearn.datasets import load_sample_images
from sklearn.model_selection import train_test_split
from torch.utils.data import Dataset

from helpers import DATA as DATA  # notebooks take it from here
from helpers.measure import progress

COLUMNS = ["image", "path", "label"]
SHOWN = 5  # bad rows spelt out in one error; the rest are counted


class DatasetError(ValueError):
    """Bad input data. The message names the rows, the files and the fix."""


def load_table(csv: str | Path, classes: int = 2) -> pd.DataFrame:
    """Read a CSV file and check every row of it, short of decoding the images.

    Returns the CSV's columns and two more: `file`, the image's absolute path, and `line`, its line
    in the CSV (the header is line 1). `label` is an int. Raises DatasetError for a CSV that cannot
    be read, is empty or lacks a column, a label that is not a whole number below `classes`, a
    relative path that leaves the CSV's folder, a missing file, and a file on two lines.

    Examples
    --------
    >>> len(load_table(DATA / "digits" / "train.csv"))
    1437
    """
    csv = Path(os.path.normpath(Path(csv).expanduser().absolute()))  # links are not followed
    options = {"keep_default_na": False, "index_col": False, "skip_blank_lines": False}
    try:
        table = pd.read_csv(csv, dtype=str, encoding="utf-8-sig", **options)
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, no columns, no table
        asked = f"Give a CSV file in UTF-8 with the columns {COLUMNS}"
        raise DatasetError(f"{csv} cannot be read: {error}. {asked}.") from None
    if missing := [column for column in COLUMNS if column not in table]:
        fix = "Rename or add the column; commas stand between columns."
        raise DatasetError(f"{csv} has no column {missing}: it has {list(table)}. {fix}")
    table["line"] = table.index + 2
    table = table[(table[COLUMNS] != "").any(axis=1)].reset_index(drop=True)
    if table.empty:
        raise DatasetError(f"{csv} has no rows below its header. Add one row per image.")
    names = zip(table.path, table.image)
    table["file"] = [os.path.normpath(csv.parent / folder / image) for folder, image in names]
    lines = {}
    problems = [_problem(row, csv.parent, classes, lines) for row in table.itertuples()]
    _raise_if_any(csv, table.line, problems)
    table["label"] = table.label.astype(float).astype(int)
    return table


def _problem(row, folder, classes, lines):
    """What is wrong with one row, and how to fix it; None if nothing is.

    `lines` has the line of each file so far, links followed.
    """
    if not row.image:
        return "`image` is empty. Write the image's file name there."
    if row.label.removesuffix(".0") not in map(str, range(classes)):
        allowed = "0 or 1" if classes == 2 else f"a whole number from 0 to {classes - 1}"
        fix = "Write such a number for each class."
        return f"{row.image}: label {row.label!r} is not {allowed}. {fix}"
    if not Path(row.path, row.image).is_absolute() and not Path(row.file).is_relative_to(folder):
        fix = "Move the image in, or write an absolute path."
        return f"{row.image}: {row.path!r} leads out of {folder}. {fix}"
    if not os.path.isfile(row.file):  # noqa: PTH113 (Path.is_file raises on too long names)
        fix = "Correct `image` or `path`, or remove the row."
        return f"{row.file} does not exist, or its folder is locked. {fix}"
    first = lines.setdefault(os.path.realpath(row.file), row.line)
    if first != row.line:
        return f"{row.image} is the same file as on line {first}. Remove one of the two rows."
    return None


def _raise_if_any(source, lines, problems):
    """Raise DatasetError if one of `lines` has a problem."""
    found = [f"  line {line}: {text}" for line, text in zip(lines, problems) if text]
    if not found:
        return
    words = [f"{source}: {len(found)} bad row(s).", *found[:SHOWN]]
    if len(found) > SHOWN:
        words.append(f"  and {len(found) - SHOWN} more")
    raise DatasetError("\n".join(words))


def read_image(file: str | Path) -> np.ndarray:
    """Decode an image file into a uint8 array of shape (height, width, 3) in RGB.

    Grey images get three equal channels, an alpha channel is dropped, 16-bit images become 8-bit,
    and the EXIF orientation is applied. A JPEG file damaged in its middle is decoded all the same.
    Raises DatasetError, which names file and fix, if it cannot be decoded.
    """
    # imdecode refuses a truncated file, which imread would fill up with grey.
    try:
        content = np.fromfile(file, dtype=np.uint8)
        image = cv2.imdecode(content, cv2.IMREAD_COLOR_RGB) if content.size else None
    except (cv2.error, OSError) as error:  # larger than OpenCV's limit; gone, or not to be read
        raise DatasetError(f"{file} cannot be read: {error}. Fix or remove its row.") from None
    if image is None:
        what = f"{file} ({content.size:,} bytes) is not an image that OpenCV can decode"
        raise DatasetError(f"{what}. Replace the file or remove its row.")
    return image


class ImageDataset(Dataset):
    """The images of a table from `load_table`, resized to one size.

    Item i is `(image, label)`: a float32 tensor of shape (3, height, width), RGB in [0, 1], and row
    i of `labels`, a tensor of any dtype and shape with as many rows as the table. Without it the
    label is float32 of shape (1,), for a model with one output. `size` is OpenCV's (width, height).
    Every file is decoded once, here, with a progress bar, unless `check` is False; DatasetError
    names all that cannot be.

    Examples
    --------
    >>> digits = ImageDataset(load_table(DATA / "digits" / "train.csv"), size=(32, 32), check=False)
    >>> image, label = digits[0]
    >>> tuple(image.shape), label
    ((3, 32, 32), tensor([0.]))
    """

    def __init__(
        self,
        table: pd.DataFrame,
        size: tuple[int, int] = (384, 512),
        check: bool = True,
        labels: torch.Tensor | None = None,
    ):
        self.files = table.file.tolist()
        self.labels = labels
        if labels is None:
            self.labels = torch.tensor(table.label.to_numpy())[:, None].float()
        if len(self.labels) != len(self.files):
            wrong = f"{len(self.labels)} labels were given for {len(self.files)} images"
            raise ValueError(f"{wrong}; give one for each row of the table")
        self.size = size
        if check:
            problems = map(_image_problem, progress(self.files, desc="Checking images"))
            _raise_if_any("The images", table.line, problems)

    def __len__(self):
        return len(self.files)

    def resized(self, index: int) -> np.ndarray:
        """The image as uint8, (height, width, 3), RGB, at the dataset's size."""
        return cv2.resize(read_image(self.files[index]), self.size)

    def __getitem__(self, index):
        image = torch.from_numpy(self.resized(index)).permute(2, 0, 1)
        return image.float().div(255), self.labels[index]


def _image_problem(file):
    """What is wrong with an image, and how to fix it; None if nothing is."""
    try:
        read_image(file)
    except DatasetError as error:
        return str(error)
    return None


def load_pair(
    train_csv: str | Path, held_out_csv: str | Path | None = None, classes: int = 2
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Load the training and the held-out table, with labels from 0 to `classes` - 1.

    Without `held_out_csv`, a `held_out.csv` beside `train_csv` is taken. If there is none, a fifth
    of the rows is held out, the same rows every time and as many of each label as in the whole.

    Examples
    --------
    >>> [len(table) for table in load_pair(DATA / "digits" / "train.csv")]
    [1437, 360]
    """
    table = load_table(train_csv, classes)
    beside = Path(train_csv).expanduser().with_name("held_out.csv")
    if held_out_csv is not None or beside.is_file():
        held_out = load_table(held_out_csv or beside, classes)
        same = table.file.map(os.path.realpath).isin(held_out.file.map(os.path.realpath))
        if common := sorted(table.file[same]):
            both = f"{common[0]} and {len(common) - 1} more are in both tables"
            raise DatasetError(f"{both}. Test on other images.")
        return table, held_out
    try:
        halves = train_test_split(table, test_size=0.2, stratify=table.label, random_state=0)
    except ValueError as error:
        counts = f"by label {table.label.value_counts().to_dict()}"
        few = f"{train_csv} has too few rows to hold some out, {counts}"
        raise DatasetError(f"{few}: {error}") from None
    train, held_out = (half.sort_index().reset_index(drop=True) for half in halves)
    return train, held_out


def write_photographs(folder: str | Path, count: int = 64) -> Path:
    """Write `count` JPEG files of a photograph's size, 2 megapixels and half a megabyte.

    They are random windows of scikit-learn's two sample photographs (Creative Commons BY 2.0, by
    danielbuechele and vultilion), enlarged, with a camera's noise. The label is 0 for the palace
    and 1 for the flower. Returns the path of their train.csv.
    """
    size = (1632, 1224)
    folder = Path(folder)
    (folder / "photographs").mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    photographs = load_sample_images().images
    noise = 5 * random.standard_normal((*size[::-1], 3), np.float32)
    table = pd.DataFrame({"image": [f"{number:04d}.jpg" for number in range(count)]})
    table["path"] = "photographs"
    table["label"] = table.index % 2
    rows = zip(table.image, table.label)
    for name, label in progress(rows, total=count, desc="Writing photographs"):
        top, left = random.integers([139, 256])  # of 427 rows and 640 columns
        window = photographs[label][top : top + 288, left : left + 384]
        image = cv2.resize(window, size, interpolation=cv2.INTER_CUBIC)
        image = (image + np.roll(noise, (top, left), (0, 1))).clip(0, 255).astype(np.uint8)
        image = cv2.cvtColor(image, cv2.COLOR_RGB2BGR)
        file = str(folder / "photographs" / name)
        cv2.imwrite(file, image, [cv2.IMWRITE_JPEG_QUALITY, 90])
    table.to_csv(folder / "train.csv", index=False, lineterminator="\n")
    return folder / "train.csv"


def write_pets(folder: str | Path, download: bool = True) -> list[Path]:
    """Write `train.csv` and `held_out.csv` for the Oxford-IIIT Pet photographs; return their paths.

    The label is 0 for a cat, 1 for a dog. `folder` then holds `oxford-iiit-pet/`, 800 MB,
    downloaded by torchvision if it is not there yet. Photographs that OpenCV cannot decode are left
    out, and named. Source: O. Parkhi, A. Vedaldi, A. Zisserman, C. Jawahar, Cats and Dogs, CVPR
    2012. Raises RuntimeError, from torchvision, if they are absent and `download` is False.
    """
    from torchvision.datasets import OxfordIIITPet

    base = Path(folder) / "oxford-iiit-pet"
    written = []
    for split, name in [("trainval", "train.csv"), ("test", "held_out.csv")]:
        OxfordIIITPet(folder, split=split, download=download)
        columns = ["name", "class", "species", "breed"]
        pets = pd.read_csv(base / f"annotations/{split}.txt", sep=" ", names=columns)
        table = pd.DataFrame({"image": pets.name + ".jpg", "path": "images"})
        table["label"] = pets.species - 1
        rows = progress(table.image, desc=f"Checking {split}")
        readable = np.array([_image_problem(base / "images" / image) is None for image in rows])
        if not readable.all():
            print(f"Left out, as OpenCV cannot decode them: {', '.join(table.image[~readable])}")
        table[readable].to_csv(base / name, index=False)
        written.append(base / name)
    return written
