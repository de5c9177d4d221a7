"""``python -m poolgrid``: the same as the console command."""

from poolgrid.server.cli.main import run

run()
