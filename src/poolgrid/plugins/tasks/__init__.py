"""Requests whose answer is not tokens: ``/v1/embeddings``, ``/v1/images/generations`` and ``/v1/videos``.

``schema`` reads the bodies, ``endpoint`` serves one request on a worker, ``result_files`` keeps what is fetched later,
and ``videos`` has the jobs that continue after their request is answered.
"""
