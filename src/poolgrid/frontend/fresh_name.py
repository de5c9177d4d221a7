"""A request's name that no client chose."""

from __future__ import annotations


class FreshName(str):
    """A name that the front end made, which is unique by itself."""

    __slots__ = ()
