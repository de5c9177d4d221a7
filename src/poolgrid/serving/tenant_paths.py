"""The paths of prompts that are remembered, for each tenant by itself.

Tenants' seeds differ, so that none finds another's paths anyway; with a part of the budget for each, none can push
another's out either.
"""

from __future__ import annotations

from poolgrid.inference.inference_request import InferenceRequest
from poolgrid.process.caches import TenantCaches
from poolgrid.serving.prompt_paths import BUDGET_BYTES, PromptPaths


class TenantPaths:
    """``PromptPaths`` by tenant, at most ``budget_bytes`` together."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self._caches = TenantCaches(budget_bytes, PromptPaths, self._forgotten)
        self._forgetful = PromptPaths(0)
        self._reused_before = 0

    def of(self, request: InferenceRequest) -> PromptPaths:
        """Return the paths that a request may find and leave; such that keep nothing where that is nobody's."""
        return self._caches.of(request.tenant, request.cache_shares) or self._forgetful

    @property
    def used_bytes(self) -> int:
        return sum(paths.used_bytes for paths in self._caches)

    @property
    def reused_blocks(self) -> int:
        """Return how many blocks' hashes were not computed again."""
        return self._reused_before + sum(paths.reused_blocks for paths in self._caches)

    def _forgotten(self, paths: PromptPaths) -> None:
        self._reused_before += paths.reused_blocks
