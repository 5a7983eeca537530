import re
import struct
from pathlib import Path

import cv2
import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from helpers import plots
from helpers.dataset import (
    DATA,
    DatasetError,
    ImageDataset,
    _read_image,
    load_pair,
    load_table,
    write_pets,
    write_photographs,
)
from tools.digits import write_digits

RED = np.zeros((40, 60, 3), np.uint8) + np.array([200, 30, 10], np.uint8)  # RGB


@pytest.fixture
def photos(tmp_path):
    """Somebody's own photographs: JPEG and PNG, several sizes, one grey, one with alpha, one rotated by EXIF."""
    folder = tmp_path / "photos"
    folder.mkdir()
    Image.fromarray(RED).save(folder / "a.jpg")
    Image.fromarray(RED[:, :30]).save(folder / "b.png")
    Image.fromarray(RED[:, :, 0]).save(folder / "grey.png")
    Image.fromarray(np.dstack([RED, np.full((40, 60), 128, np.uint8)])).save(folder / "alpha.png")
    rotated = Image.fromarray(np.concatenate([RED, np.zeros_like(RED)]))  # red above black
    exif = rotated.getexif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to see it upright
    rotated.save(folder / "rotated.jpg", exif=exif)
    names = ["a.jpg", "b.png", "grey.png", "alpha.png", "rotated.jpg"]
    return write_csv(tmp_path, [f"{name},photos,{i % 2}" for i, name in enumerate(names)])


def write_csv(folder, rows, header="image,path,label"):
    csv = folder / "train.csv"
    csv.write_text("\n".join([header, *rows]) + "\n")
    return csv


def message(csv):
    with pytest.raises(DatasetError) as error:
        ImageDataset(load_table(csv), (8, 8))
    return str(error.value)


def test_labels_of_any_dtype_and_shape_pass_through(photos):
    table = load_table(photos)
    for labels in (torch.arange(5), torch.rand(5, 3), torch.zeros(5, 2, 2, dtype=torch.uint8)):
        dataset = ImageDataset(table, (8, 8), labels=labels)
        _, batch = next(iter(DataLoader(dataset, 5)))
        assert batch.dtype == labels.dtype and torch.equal(batch, labels)
    with pytest.raises(ValueError, match="4 labels were given for 5 images"):
        ImageDataset(table, (8, 8), labels=torch.arange(4))


def test_more_classes_than_two(photos):
    csv = write_csv(photos.parent, ["a.jpg,photos,0", "b.png,photos,4", "grey.png,photos,2.0"])
    assert load_table(csv, classes=5).label.tolist() == [0, 4, 2]
    with pytest.raises(DatasetError, match="label '4' is not a whole number from 0 to 3"):
        load_table(csv, classes=4)


def test_items_are_float_rgb_and_label(photos):
    dataset = ImageDataset(load_table(photos), size=(384, 512))
    image, label = dataset[1]
    assert image.shape == (3, 512, 384) and image.dtype == torch.float32
    assert label.shape == (1,) and label.dtype == torch.float32 and label.item() == 1
    assert torch.equal((image * 255).mean(dim=(1, 2)).round(decimals=2), torch.tensor([200.0, 30.0, 10.0]))


def test_grey_alpha_and_exif_are_read_as_one_sees_them(photos):
    files = load_table(photos).set_index("image").file
    grey, alpha, rotated = (_read_image(files[name]) for name in ("grey.png", "alpha.png", "rotated.jpg"))
    assert grey.shape == (40, 60, 3) and (grey == 200).all()
    assert alpha.shape == (40, 60, 3) and (alpha == RED).all()
    assert rotated.shape == (60, 80, 3)
    assert rotated[:, 60:].mean() > 70 and rotated[:, :20].mean() < 10  # what was above is now on the right


def test_absolute_folder_may_lie_anywhere(photos, tmp_path):
    elsewhere = tmp_path / "csv"
    elsewhere.mkdir()
    csv = write_csv(elsewhere, [f"a.jpg,{tmp_path / 'photos'},1"])
    assert ImageDataset(load_table(csv), (4, 4))[0][0].shape == (3, 4, 4)


def test_excel_utf8_and_blank_lines_are_fine(photos):
    photos.write_bytes(b"\xef\xbb\xbfimage,path,label,who\n\na.jpg,photos,1.0,me\n")
    table = load_table(photos)
    assert table.label.tolist() == [1] and table.line.tolist() == [3]


@pytest.mark.parametrize(
    "row, words",
    [
        ("gone.jpg,photos,1", ["line 2", "gone.jpg", "does not exist", "Correct"]),
        (",photos,1", ["line 2", "`image` is empty"]),
        ("a.jpg,photos,2", ["line 2", "a.jpg", "'2' is not 0 or 1", "Write such a number"]),
        ("a.jpg,photos", ["line 2", "'' is not 0 or 1"]),
        ("photos,.,1", ["line 2", "does not exist"]),  # but a folder
        ("x" * 300 + ".jpg,photos,1", ["line 2", "does not exist"]),
        ("passwd,../..,1", ["line 2", "passwd", "leads out of", "absolute path"]),
    ],
)
def test_bad_row_names_line_file_and_fix(photos, row, words):
    text = message(write_csv(photos.parent, [row, "b.png,photos,0"]))
    assert all(word in text for word in words), text
    assert "1 bad row" in text


def test_a_file_on_two_lines_is_refused_as_it_could_be_trained_on_and_held_out(photos):
    (photos.parent / "photos/link.jpg").symlink_to("a.jpg")
    (photos.parent / "linked").symlink_to("photos")
    rows = ["a.jpg,photos,1", "b.png,photos,0", "a.jpg,photos,0", "a.jpg,linked,1", "link.jpg,./photos,1"]
    text = message(write_csv(photos.parent, rows))
    assert "3 bad row(s)" in text and "line 4: a.jpg is the same file as on line 2. Remove one" in text
    assert "line 5: a.jpg is the same file as on line 2" in text and "line 6: link.jpg is the same file" in text


def test_lines_are_counted_as_an_editor_does(photos):
    rows = ['a.jpg,photos,1,"one', "two\r", 'three"', "b.png,photos,0,", "gone.jpg,photos,1,"]
    assert "line 6: " in message(write_csv(photos.parent, rows, header="image,path,label,note"))


def test_another_separator_is_shown(photos):
    photos.write_text(photos.read_text().replace(",", ";"))
    assert "it has ['image;path;label']. Rename or add the column; commas stand" in message(photos)


def test_a_second_column_of_one_name_is_refused_where_it_matters(photos):
    assert "read as ['label.1']" in message(write_csv(photos.parent, ["a.jpg,photos,1,0"], "image,path,label,label"))
    csv = write_csv(photos.parent, ["a.jpg,photos,1,0,0"], "image,path,label,note,note")
    assert len(load_table(csv)) == 1


def test_a_file_that_vanished_after_the_table_was_read_is_named(photos):
    table = load_table(photos)
    checked = ImageDataset(table, (8, 8))
    Path(table.file[1]).unlink()
    for meet in (lambda: checked[1], lambda: ImageDataset(table, (8, 8))):
        with pytest.raises(DatasetError, match=r"b\.png cannot be read: .*No such file"):
            meet()


def test_an_image_too_large_for_memory_is_refused_by_its_header(photos):
    file = photos.parent / "photos/a.jpg"
    Image.new("RGB", (4, 4)).save(file, "BMP")
    content = bytearray(file.read_bytes())
    content[18:26] = struct.pack("<ii", 30_000, 30_000)  # width and height
    file.write_bytes(content)
    assert re.search(r"a\.jpg: Image size \(900000000 pixels\) exceeds .* Shrink the image", message(photos))


@pytest.mark.parametrize("name, content", [("a.jpg", b""), ("a.jpg", "half"), ("b.png", "half")])
def test_undecodable_image_is_refused_before_training(photos, content, name):
    file = photos.parent / "photos" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2] if content == "half" else content)
    text = message(photos)
    assert name in text and "line" in text and "Replace the file" in text
    trusting = ImageDataset(load_table(photos), (8, 8), check=False)
    with pytest.raises(DatasetError, match=name):
        [trusting[i] for i in range(len(trusting))]


def test_bad_csv(tmp_path):
    assert "No such file" in message(tmp_path / "none.csv")
    csv = tmp_path / "train.csv"
    csv.write_text("")
    assert "cannot be read: No columns to parse from file. Give a CSV file" in message(csv)
    assert "no column ['label']" in message(write_csv(tmp_path, ["a,b"], header="image,path"))
    assert "no rows" in message(write_csv(tmp_path, []))
    csv.write_bytes(b"image,path,label\n\xff\xfe,x,1\n")
    assert "cannot be read" in message(csv)


def test_bad_size_and_empty_table(photos):
    table = load_table(photos)
    with pytest.raises(ValueError, match="width, height"):
        ImageDataset(table, (0, 8))
    with pytest.raises(DatasetError, match="no rows"):
        ImageDataset(table[:0])


def test_one_csv_is_split_the_same_way_every_time(photos):
    for i in range(50):
        Image.fromarray(RED).save(photos.parent / "photos" / f"{i}.png")
    rows = [f"{i}.png,photos,{i % 2}" for i in range(50)]
    csv = write_csv(photos.parent, rows)
    train, held_out = load_pair(csv)
    assert len(train) == 40 and len(held_out) == 10 and held_out.label.mean() == 0.5
    assert set(train.line).isdisjoint(held_out.line)
    assert load_pair(csv)[1].equals(held_out)
    with pytest.raises(DatasetError, match=r"too few rows to hold some out, by label \{0: 2, 1: 2\}"):
        load_pair(write_csv(photos.parent, rows[:4]))


def test_held_out_csv_beside_the_training_csv_is_used(photos):
    same_by_another_name = photos.parent / "linked"
    same_by_another_name.symlink_to(photos.parent / "photos")
    beside = photos.with_name("held_out.csv")
    beside.write_text("image,path,label\nb.png,linked,0\n")
    with pytest.raises(DatasetError, match=r"b\.png and 0 more are in both tables"):
        load_pair(photos)
    write_csv(photos.parent, ["a.jpg,photos,1"])
    train, held_out = load_pair(photos)
    assert train.image.tolist() == ["a.jpg"] and held_out.image.tolist() == ["b.png"]
    (photos.parent / "other.csv").write_text("image,path,label\ngrey.png,photos,1\n")
    assert load_pair(photos, photos.parent / "other.csv")[1].image.tolist() == ["grey.png"]


@pytest.mark.filterwarnings("ignore::pandas.errors.ParserWarning")
def test_images_may_be_linked_in_and_rows_may_end_in_commas(photos, tmp_path):
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/photos").symlink_to(tmp_path / "photos")
    csv = write_csv(tmp_path / "linked", ["a.jpg,photos,1,", "b.png,photos,0,"])
    assert len(ImageDataset(load_table(csv), (4, 4))) == 2


def test_digits_in_the_repository_are_those_that_the_function_writes(tmp_path):
    write_digits(tmp_path)
    for name in ("train.csv", "held_out.csv"):
        assert (tmp_path / name).read_text() == (DATA / "digits" / name).read_text()
    train, held_out = load_pair(DATA / "digits" / "train.csv", DATA / "digits" / "held_out.csv")
    assert (len(train), len(held_out)) == (1437, 360)
    table = pd.concat([train, held_out])
    assert (table.label == table.digit.astype(int) % 2).all() and table.file.is_unique
    for file in table.file[::50]:
        ours, theirs = cv2.imread(file), cv2.imread(file.replace(str(DATA / "digits"), str(tmp_path)))
        assert np.abs(ours.astype(int) - theirs).max() <= 4  # JPEG libraries may differ in the last bits


def lay_out_pets(base, lines):
    for folder in ("images", "annotations/trimaps"):
        (base / folder).mkdir(parents=True)
    for split, rows in lines.items():
        (base / f"annotations/{split}.txt").write_text("\n".join(rows) + "\n")
        for row in rows:
            Image.fromarray(RED).save(base / "images" / f"{row.split()[0]}.jpg")


def test_pets_from_a_tiny_set_laid_out_the_same_way(tmp_path, capsys):
    base = tmp_path / "oxford-iiit-pet"
    lines = {"trainval": ["Abyssinian_1 1 1 1", "beagle_2 5 2 1"], "test": ["beagle_3 5 2 1", "Bengal_4 6 1 2"]}
    lay_out_pets(base, lines)
    (base / "images/Bengal_4.jpg").write_bytes(b"GIF87a")
    train, held_out = load_pair(*write_pets(tmp_path, download=False))
    assert train.image.tolist() == ["Abyssinian_1.jpg", "beagle_2.jpg"] and train.label.tolist() == [0, 1]
    assert held_out.image.tolist() == ["beagle_3.jpg"] and held_out.label.tolist() == [1]
    assert "Bengal_4.jpg" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="not found"):
        write_pets(tmp_path / "nowhere", download=False)


def test_pets_take_the_digits_place_by_one_setting_of_07(tmp_path):
    rows = [f"{breed}_{i} 1 {species} 1" for i in range(20) for breed, species in (("Bengal", 1), ("beagle", 2))]
    lay_out_pets(tmp_path / "oxford-iiit-pet", {"trainval": rows[:32], "test": rows[32:]})  # so nothing is downloaded
    notebook = nbformat.read(DATA.parent / "notebooks" / "07_fp32_vs_amp_experiment.ipynb", as_version=4)
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    names = {"plots": plots}
    (settings,) = [source for source in sources if "TRAIN_CSV = DATA" in source]
    exec(settings, names)
    (told,) = [cell.source for cell in notebook.cells if '`TRAIN_CSV, TEST_CSV = write_pets("pets")`' in cell.source]
    for line in re.findall(r"`([^`]*write_pets[^`]*)`", told):
        exec(line.replace('"pets"', repr(str(tmp_path))), names)
    (data,) = [source for source in sources if "= load_pair(TRAIN_CSV" in source]
    exec(data, names)
    assert names["train_table"].label.value_counts().to_dict() == {0: 16, 1: 16}
    assert len(names["test_table"]) == 8


def test_made_photographs_have_a_photographs_size_and_both_labels(tmp_path):
    table = load_table(write_photographs(tmp_path, count=2))
    assert table.label.tolist() == [0, 1]
    assert _read_image(table.file[0]).shape == (1224, 1632, 3)
