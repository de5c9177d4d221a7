"""The shell kit that poolgrid's processes share: clocks, logs, lifecycle, settings. It decides nothing."""
