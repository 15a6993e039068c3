"""A run under way: what it reads, what it is built of, what it saves and measures."""
