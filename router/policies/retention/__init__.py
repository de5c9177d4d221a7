"""How long the blocks of prompts should stay in caches: learnt from the prompts of one router, and said to engines."""
