"""The data path in front of engine servers: a client's bytes go to a server, and the server's bytes to the client.

May import of the kernel ``wire`` and ``requests``; of the server ``forwarding``, ``process``, ``http`` and
``frontend``.
"""
