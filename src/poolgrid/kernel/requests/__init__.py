"""The life of a request: its fields, its legs, the table of what happens to them, its tokens in order.

May import of the kernel ``wire``.
"""
