"""What this machine's GPU does, recorded by plain scripts: see `__main__`."""
