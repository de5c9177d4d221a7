"""What every process has: clock, tasks, logs, metrics, settings, lifecycle, plug-ins.

May import of the kernel ``wire``, ``requests.log_fields`` and ``requests.trace_record``.
"""
