"""A simulated inference engine: pure, deterministic, in whatever time its caller lives.

``next_token`` says what it generates, ``block_pool`` where KV blocks lie, ``scheduler`` who runs next, ``engine`` what
one step does; how long it takes says ``poolgrid.server.workers.timing``. ``docs/internals/simulated_engine.md``
explains the model.
"""
