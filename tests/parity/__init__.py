"""The MLX runner against mlx-lm's own cache."""
