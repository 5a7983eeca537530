"""Images and labels from a CSV file, checked before training starts.

The CSV has three columns: `image` (a file name), `path` (its folder, absolute or relative to the CSV) and `label`
(0 or 1; with more classes a whole number from 0). Further columns are kept and ignored.
"""

import os
from pathlib import Path

import cv2
import numpy as np
import pandas as pd
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from sklearn.model_selection import train_test_split
from torch.utils.data import Dataset

from helpers import DATA as DATA  # notebooks take it from here
from helpers.measure import progress

COLUMNS = ["image", "path", "label"]
SHOWN = 5  # bad rows spelt out in one error; the rest are counted


class DatasetError(ValueError):
    """Bad input data. The message names the rows, the files and the fix."""


def load_table(csv, classes=2):
    """Read a CSV file and check every row of it, short of decoding the images.

    Returns a DataFrame with the CSV's columns and two more, which replace columns of the same names: `file`, the
    image's absolute path, and `line`, its line in the CSV (the header is line 1). `label` is an int.
    Raises DatasetError for a missing or empty CSV, a column that is missing or there twice, a label that is not a whole
    number below `classes`, a relative path that leaves the CSV's folder, a missing file, and a file on two lines.

    Examples
    --------
    >>> len(load_table(DATA / "digits" / "train.csv"))
    1437
    """
    csv = Path(os.path.normpath(Path(csv).expanduser().absolute()))  # links are not followed: images may be linked in
    options = {"keep_default_na": False, "index_col": False, "encoding": "utf-8-sig", "skip_blank_lines": False}
    try:
        table = pd.read_csv(csv, dtype=str, **options)
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, no columns, no table
        asked = f"Give a CSV file in UTF-8 with the columns {COLUMNS}"
        raise DatasetError(f"{csv} cannot be read: {error}. {asked}.") from None
    if missing := [column for column in COLUMNS if column not in table]:
        mend = "Rename or add the column; commas stand between columns."
        raise DatasetError(f"{csv} has no column {missing}: it has {list(table)}. {mend}")
    if twice := [f"{column}.1" for column in COLUMNS if f"{column}.1" in table]:
        raise DatasetError(f"{csv} has a column twice: the second is read as {twice}. Remove or rename it.")
    breaks = sum(table[column].str.count("\n") for column in table)  # within quotes
    table["line"] = table.index + 2 + breaks.cumsum().shift(fill_value=0)
    table = table[(table[COLUMNS] != "").any(axis=1)].reset_index(drop=True)
    if table.empty:
        raise DatasetError(f"{csv} has no rows below its header. Add one row an image.")

    table["file"] = [os.path.normpath(csv.parent / folder / image) for folder, image in zip(table.path, table.image)]
    lines = {}
    _raise_if_any(csv, [(row.line, _problem(row, csv.parent, classes, lines)) for row in table.itertuples()])
    table["label"] = table.label.astype(float).astype(int)
    return table


def _problem(row, folder, classes, lines):
    """What is wrong with one row, and how to mend it; None if nothing is. `lines` has the files before it."""
    if not row.image:
        return "`image` is empty. Write the image's file name there."
    if row.label.removesuffix(".0") not in map(str, range(classes)):
        allowed = "0 or 1" if classes == 2 else f"a whole number from 0 to {classes - 1}"
        return f"{row.image}: label {row.label!r} is not {allowed}. Write such a number for each class."
    file = Path(row.file)
    if not Path(row.path, row.image).is_absolute() and not file.is_relative_to(folder):
        return f"{row.image}: {row.path!r} leads out of {folder}. Move the image in, or write an absolute path."
    if not os.path.isfile(file):  # noqa: PTH113 (Path.is_file raises on names that no file can have)
        return f"{file} does not exist, or its folder is locked. Correct `image` or `path`, or remove the row."
    first = lines.setdefault(_identity(row.file), row.line)
    if first != row.line:
        return f"{row.image} is the same file as on line {first}. Remove one of the two rows."
    return None


def _identity(file):
    """What two names of one file share: a link is the file that it leads to."""
    found = os.stat(file)  # noqa: PTH116
    return found.st_dev, found.st_ino or file


def _raise_if_any(source, rows):
    """Raise DatasetError if one of `rows`, pairs of a line and its problem, has a problem."""
    problems = [f"  line {line}: {problem}" for line, problem in rows if problem]
    if problems:
        more = [f"  and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise DatasetError("\n".join([f"{source}: {len(problems)} bad row(s).", *problems[:SHOWN], *more]))


def _read_image(file):
    """Decode an image file into a uint8 array of shape (height, width, 3) in RGB.

    Grey images get three equal channels, an alpha channel is dropped, 16-bit images become 8-bit, and the EXIF
    orientation is applied. A JPEG file damaged in its middle is decoded all the same: libjpeg fills the gap, and says
    so on the standard error stream only. Raises DatasetError, which names file and fix, if it cannot be decoded.
    """
    # imdecode refuses a truncated file, which imread would fill up with grey; it also copes with any file name.
    try:
        content = np.fromfile(file, dtype=np.uint8)
        image = cv2.imdecode(content, cv2.IMREAD_COLOR_RGB) if content.size else None
    except (cv2.error, OSError) as error:  # larger than OpenCV's limit; gone, or not to be read
        raise DatasetError(f"{file} cannot be read: {error}. Mend that, or remove its row.") from None
    if image is None:
        what = f"{file} ({content.size:,} bytes) is not an image that OpenCV can decode"
        raise DatasetError(f"{what}. Replace the file or remove its row.")
    return image


class ImageDataset(Dataset):
    """The images of a table from `load_table`, resized to one size.

    Item i is `(image, label)`: a float32 tensor of shape (3, height, width), RGB in [0, 1], and row i of `labels`, a
    tensor of any dtype and shape with as many rows as the table. Without it the label is float32 of shape (1,), for a
    model with one output. `size` is OpenCV's (width, height). With `check` every file is decoded once, here, with a
    progress bar; DatasetError names all that cannot be decoded or are too large for Pillow.

    Examples
    --------
    >>> digits = ImageDataset(load_table(DATA / "digits" / "train.csv"), size=(32, 32), check=False)
    >>> image, label = digits[0]
    >>> tuple(image.shape), label
    ((3, 32, 32), tensor([0.]))
    """

    def __init__(self, table, size=(384, 512), check=True, labels=None):
        width, height = size
        if width < 1 or height < 1:
            raise ValueError(f"size is (width, height) in pixels, at least (1, 1); got {size}")
        if table.empty:
            raise DatasetError("The table has no rows. Give a table from load_table with at least one image.")
        self.files = table.file.tolist()
        self.labels = torch.tensor(table.label.to_numpy())[:, None].float() if labels is None else labels
        if len(self.labels) != len(self.files):
            raise ValueError(f"{len(self.labels)} labels were given for {len(self.files)} images")
        self.size = (width, height)
        if check:
            rows = progress(zip(table.line, self.files), total=len(self.files), desc="Checking images")
            _raise_if_any("The images", [(line, _image_problem(file)) for line, file in rows])

    def __len__(self):
        return len(self.files)

    def resized(self, index, out=None):
        """The image as uint8, (height, width, 3), RGB, at the dataset's size; in the array `out` if there is one."""
        return cv2.resize(_read_image(self.files[index]), self.size, dst=out)

    def __getitem__(self, index):
        return torch.from_numpy(self.resized(index)).permute(2, 0, 1).float().div(255), self.labels[index]


def _image_problem(file):
    """What is wrong with an image, and how to mend it; None if nothing is."""
    try:
        Image.open(file).close()  # reads the size alone, which OpenCV cannot
    except Image.DecompressionBombError as error:
        return f"{file}: {error} Shrink the image or remove its row."
    except Exception:  # damaged, or of a format that Pillow does not know, but perhaps OpenCV
        pass
    try:
        _read_image(file)
    except DatasetError as error:
        return str(error)
    return None


def load_pair(train_csv, held_out_csv=None, held_out_share=0.2, classes=2):
    """Load the training and the held-out table: `(train, held_out)`, with labels from 0 to `classes` - 1.

    Without `held_out_csv`, a `held_out.csv` beside `train_csv` is taken. If there is none, `held_out_share` of the rows
    is held out, the same rows every time and as many of each label as in the whole.

    Examples
    --------
    >>> [len(table) for table in load_pair(DATA / "digits" / "train.csv")]
    [1437, 360]
    """
    table, beside = load_table(train_csv, classes), Path(train_csv).expanduser().with_name("held_out.csv")
    if held_out_csv is not None or beside.is_file():
        held_out = load_table(held_out_csv or beside, classes)
        same = table.file.map(_identity).isin(set(held_out.file.map(_identity)))
        if common := sorted(table.file[same]):
            raise DatasetError(f"{common[0]} and {len(common) - 1} more are in both tables. Test on other images.")
        return table, held_out
    try:
        train, held_out = train_test_split(table, test_size=held_out_share, stratify=table.label, random_state=0)
    except ValueError as error:
        counts = table.label.value_counts().to_dict()
        raise DatasetError(f"{train_csv} has too few rows to hold some out, by label {counts}: {error}") from None
    return train.sort_index().reset_index(drop=True), held_out.sort_index().reset_index(drop=True)


def write_photographs(folder, count=64, size=(1632, 1224)):
    """Write `count` JPEG files of a photograph's size, 2 megapixels and half a megabyte; returns their train.csv.

    They are random windows of scikit-learn's two sample photographs (Creative Commons BY 2.0, by danielbuechele and
    vultilion), enlarged, with a camera's noise. The label is 0 for the palace and 1 for the flower.
    """
    folder, random = Path(folder), np.random.default_rng(0)
    (folder / "photographs").mkdir(parents=True, exist_ok=True)
    photographs, noise = load_sample_images().images, 5 * random.standard_normal((*size[::-1], 3), np.float32)
    names, labels = [f"{i:04d}.jpg" for i in range(count)], np.arange(count) % 2
    for name, label in progress(zip(names, labels), total=count, desc="Writing photographs"):
        top, left = random.integers([139, 256])  # of 427 rows and 640 columns, 288 and 384 are cut out
        window = photographs[label][top : top + 288, left : left + 384]
        image = cv2.resize(window, size, interpolation=cv2.INTER_CUBIC) + np.roll(noise, (top, left), (0, 1))
        image = cv2.cvtColor(image.clip(0, 255).astype(np.uint8), cv2.COLOR_RGB2BGR)
        cv2.imwrite(str(folder / "photographs" / name), image, [cv2.IMWRITE_JPEG_QUALITY, 90])
    table = pd.DataFrame({"image": names, "path": "photographs", "label": labels})
    table.to_csv(folder / "train.csv", index=False, lineterminator="\n")
    return folder / "train.csv"


def write_pets(folder, download=True):
    """Write `train.csv` and `held_out.csv` for the Oxford-IIIT Pet photographs; returns their paths.

    The label is 0 for a cat, 1 for a dog. `folder` then holds `oxford-iiit-pet/`, 800 MB, downloaded by torchvision
    if it is not there yet. Photographs that OpenCV cannot decode are left out, and named.
    Source: O. Parkhi, A. Vedaldi, A. Zisserman, C. Jawahar, Cats and Dogs, CVPR 2012.
    Raises RuntimeError, from torchvision, if the photographs are absent and `download` is False.
    """
    from torchvision.datasets import OxfordIIITPet

    written = []
    for split, name in [("trainval", "train.csv"), ("test", "held_out.csv")]:
        OxfordIIITPet(folder, split=split, download=download)
        base = Path(folder) / "oxford-iiit-pet"
        pets = pd.read_csv(base / f"annotations/{split}.txt", sep=" ", names=["name", "class", "species", "breed"])
        table = pd.DataFrame({"image": pets.name + ".jpg", "path": "images", "label": pets.species - 1})
        rows = progress(table.image, desc=f"Checking {split}")
        readable = np.array([_image_problem(base / "images" / image) is None for image in rows])
        if not readable.all():
            print(f"Left out, as OpenCV cannot decode them: {', '.join(table.image[~readable])}")
        table[readable].to_csv(base / name, index=False)
        written.append(base / name)
    return written
