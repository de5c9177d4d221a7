"""Why a worker reuses more or less than the router promised: evidence in, a verdict out. Pure.

May import nothing of poolgrid.
"""
