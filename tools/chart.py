"""Copy the chart of published gains from notebook 00, as it is stored there, to docs/gains.png, which README shows.

uv run python -m tools.chart
"""

import base64

import nbformat

from tools.execute import NOTEBOOKS

PICTURE = NOTEBOOKS.parent / "docs" / "gains.png"


def stored():
    """The chart's PNG and what it says to whoever cannot see it."""
    for cell in nbformat.read(NOTEBOOKS / "00_start_here.ipynb", as_version=4).cells:
        for output in cell.get("outputs", []):
            if "a dot per network" in str(output.get("metadata", {})):
                return base64.b64decode(output.data["image/png"]), output.metadata["image/png"]["alt"]
    raise LookupError("Notebook 00 holds no chart of gains: run `uv run python -m tools.execute 00_` first.")


if __name__ == "__main__":
    PICTURE.write_bytes(stored()[0])
    print(f"Written: {PICTURE}")
