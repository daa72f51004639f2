"""Custom operations: one contract each, several implementations."""
