"""What a model wrote, taken apart: content, reasoning and tool calls, while it is still being written.

Pure and incremental. Text goes in cut anywhere, pieces come out; how it was cut changes where pieces end, never what
they add up to. Nothing is lost and nothing is an error: what does not follow its format comes out as content.
"""
