"""Run notebooks on this machine's own device and keep the records that they save; the notebooks stay as they are.

uv run python -m tools.record 07
uv run python -m tools.record 07 --try "SEEDS = range(30)" --to copies      # keeps the executed copies too
"""

from tools.execute import execute_all, options_of

if __name__ == "__main__":
    options = options_of(__doc__).parse_args()
    execute_all(options.words, options.settings, options.to)
