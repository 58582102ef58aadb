"""Small wrong edits of the engine, each of which must turn a test red."""
