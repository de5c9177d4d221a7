"""`python -m cli`: the same as the console command."""

from cli.main import run

run()
