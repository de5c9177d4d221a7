"""What a choice is: the request and the candidates that a policy sees, the legs of a request, the recorded decision.

May import of the kernel ``wire``, and ``index.following_tokens``.
"""
