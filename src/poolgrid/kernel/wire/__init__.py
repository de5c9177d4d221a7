"""The contract between poolgrid's processes: identifiers, hashing, events, messages, codecs, limits, errors.

Everything that crosses a socket or lies on disk is defined here and nowhere else.
May import nothing of poolgrid.
"""
