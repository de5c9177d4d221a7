"""Tensors from one worker to another: offered, described, fetched, released; over ZMQ, or by NIXL where both have it.

``tensor_store`` is what a source keeps (pure), ``zmq_transfer`` serves and fetches it over sockets, ``nixl_transfer``
reads it from the source's memory and leaves the rest to the former. ``port`` is what engines see of either.
"""
