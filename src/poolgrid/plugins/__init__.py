"""Parts that an installation may lack: each is a folder that can be deleted, and an entry point names it.

The outermost of three rings: a plug-in may import ``kernel`` and ``server``, and nothing imports a plug-in.
Each has a ``README.md`` of its own.
"""
