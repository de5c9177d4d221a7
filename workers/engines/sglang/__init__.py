"""SGLang's own server as an engine."""
