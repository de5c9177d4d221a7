"""poolgrid: a router for LLM workers that knows which of them holds which part of a prompt.

Three rings, with imports inwards only: ``kernel`` is what an owner must know, ``server`` makes processes of it, and
``plugins`` are parts that an installation may lack.
"""

__version__ = "0.1.0"
