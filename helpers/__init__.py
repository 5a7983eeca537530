"""What a reader of the notebooks may skip: data loading, timing, reading the hardware, records and plots."""

from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "data"
