"""Grids made offline from what pools measured."""
