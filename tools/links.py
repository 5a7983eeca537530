"""Write links to Colab and Kaggle into README, for each notebook, at the address where the suite is published.

uv run python -m tools.links https://github.com/NAME/REPOSITORY

Run again with another address, it replaces them.
"""

import argparse
import re
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
ROW = re.compile(r"^(\| \[[^]]+\]\((notebooks/[^)]+\.ipynb)\))[^|]*\|", re.MULTILINE)


def linked(readme, address, branch="main"):
    """The text of README with both links in each row of its table of notebooks, and the address to clone.

    Raises ValueError for an address that is not a repository's on GitHub: neither platform opens notebooks from others.
    """
    found = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+?)(\.git)?/?", address)
    if not found:
        raise ValueError(f"{address} is not of the form https://github.com/NAME/REPOSITORY")
    name = found[1]

    def with_links(row):
        file = f"{name}/blob/{branch}/{row[2]}"
        colab = f"https://colab.research.google.com/github/{file}"
        kaggle = f"https://kaggle.com/kernels/welcome?src=https://github.com/{file}"
        return f"{row[1]} [Colab]({colab}) [Kaggle]({kaggle}) |"

    return re.sub(r"`!git clone \S+`", f"`!git clone https://github.com/{name}`", ROW.sub(with_links, readme))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.add_argument("--branch", default="main")
    options = parser.parse_args()
    text = linked(README.read_text(encoding="utf-8"), options.address, options.branch)
    README.write_text(text, encoding="utf-8")
