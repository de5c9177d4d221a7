"""`poolgrid config build`: grids made offline from what pools measured."""
