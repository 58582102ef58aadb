"""Properties: random sequences of moves against invariants and slow, obvious models."""
