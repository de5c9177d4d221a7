"""Grammars and schemas for structured output: limits, structural tags, the parsers of a model's output."""
