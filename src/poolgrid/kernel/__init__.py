"""What an owner of poolgrid must know: the contract, the index, the choice, the event log, the life of a request.

The innermost of three rings: it imports nothing of poolgrid but itself, opens no socket and reads no clock.
Begin with its ``README.md``.
"""
