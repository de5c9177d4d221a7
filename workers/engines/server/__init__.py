"""Engines that run in a server of their own and are asked over HTTP: what the dialects of such servers share."""
