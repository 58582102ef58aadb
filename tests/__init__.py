"""The tests. A package by this file, so that no other top-level ``tests`` can take its place."""
