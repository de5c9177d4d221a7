"""What tests of the API share with those of the front end."""

from tests.frontend.conftest import shared_front_ends

__all__ = ["shared_front_ends"]
