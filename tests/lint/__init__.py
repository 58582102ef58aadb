"""Lint, types and the direction of imports, as tests."""
