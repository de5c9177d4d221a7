"""Requests and answers in SGLang's words. Pure."""
