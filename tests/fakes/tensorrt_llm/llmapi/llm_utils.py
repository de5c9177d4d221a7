"""Where the argument helpers are imported from."""

from __future__ import annotations

from .llm_args import update_llm_args_with_extra_dict, update_llm_args_with_extra_options

__all__ = ["update_llm_args_with_extra_dict", "update_llm_args_with_extra_options"]
