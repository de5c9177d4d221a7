"""A simulated inference engine: pure, deterministic, in whatever time its caller lives.

``next_token`` says what it generates, ``timing`` how long a step takes, ``block_pool`` where KV blocks lie,
``scheduler`` who runs next, ``engine`` what one step does. ``docs/simulated_engine.md`` explains the model.
"""
