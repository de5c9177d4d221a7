"""Who may ask, for what, and how much: API keys, tenants, their limits and their cache salts."""
