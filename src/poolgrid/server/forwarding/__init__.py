"""What is changed in a forwarded request and its answer, and which requests are forwarded. Pure.

May import of the kernel ``wire``; of the server ``diagnosis``.
"""
