"""Worker processes: an engine, its request plane and its event stream.

May import of the kernel ``wire``, ``requests.log_fields``, ``requests.trace_record``, ``kv_events`` and
``worker_protocol``; of the server ``structured_output``, ``process``, ``transport``, ``http`` and ``discovery``.
"""
