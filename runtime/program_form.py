"""In which form the program runs, as its installation made it (``setup.py``)."""

from __future__ import annotations


def program_form() -> str:
    """Return ``compiled`` where the modules of ``compiled_modules.toml`` are, as this one is, else ``interpreted``."""
    return "interpreted" if __file__.endswith((".py", ".pyc")) else "compiled"
