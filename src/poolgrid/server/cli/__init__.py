"""The command line: one module a command, and the only place that knows every service.

May import the kernel and all of the server.
"""
