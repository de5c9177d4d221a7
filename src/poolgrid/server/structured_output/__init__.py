"""Grammars and schemas for structured output: limits and structural tags. Pure.

May import of the kernel ``wire``.
"""
