"""Runners compute steps: `virtual` by a cost model and a clock, `mlx` with a real model.

Nothing is imported here, so that ``import minivllm`` never imports MLX.
"""
