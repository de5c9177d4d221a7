"""What makes processes of the kernel: HTTP API, sockets, disk, clocks, settings, command line.

The second of three rings: it may import ``kernel`` and itself, and finds plug-ins by their entry points only.
``router``, ``global_router`` and ``workers`` are links to the directories at the top of the repository.
"""
