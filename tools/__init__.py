"""What maintainers run, each as `uv run python -m tools.NAME`."""
