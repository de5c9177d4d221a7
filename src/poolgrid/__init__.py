"""poolgrid: a router for LLM workers that knows which of them holds which part of a prompt.

The one name that an installation adds. Its parts are the directories at the top of the repository:
``poolgrid.server.router`` is ``router/``. ``pyproject.toml`` says which directories these are.
"""

__version__ = "0.1.0"
