"""The contract between poolgrid's processes: identifiers, hashing, events, messages, codecs, limits, errors.

Everything that crosses a socket or lies on disk is defined here and nowhere else. ``wire`` imports nothing of ours, and
services import ``wire`` but never each other.
"""
