"""``python -m poolgrid``: the same as the console command."""

from poolgrid.cli.main import run

run()
