"""The shared pool: the store as Mooncake's master keeps it, its policies, and an instance's client."""
