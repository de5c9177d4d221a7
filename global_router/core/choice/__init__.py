"""From a request to a pool: its cell, where it may go instead, and what pools have shown of themselves."""
