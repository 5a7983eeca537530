"""Build the suite as a site: `uv run python -m tools.site`, then open site/html/index.html. No cell runs."""

import argparse
import subprocess
import sys
from pathlib import Path

CONFIGURATION = Path(__file__).resolve().parent
ROOT = CONFIGURATION.parent.parent


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, default=ROOT, help="the folder with README.md and notebooks/")
    parser.add_argument("--to", type=Path, default=ROOT / "site" / "html", help="where to write the site")
    options = parser.parse_args()
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", CONFIGURATION]
    sys.exit(subprocess.run([*command, options.source, options.to]).returncode)


if __name__ == "__main__":
    main()
