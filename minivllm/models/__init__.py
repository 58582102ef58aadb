"""Models: by name to weights and tokenizer, on this machine.

Owns names, downloads and their cache, the GGUF reader, LoRA adapters, and the BLAS library that makes MLX's CPU backend
fast. Must not know requests, blocks or steps.

Read `load` (a model by its name), then `downloads`, `gguf` and `adapters` as you need them. `cpu_blas` must run before
MLX is imported.
"""
