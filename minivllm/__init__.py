"""minivllm: a compact serving engine with prefix caching, built to be looked at.

    from minivllm import Engine

    with Engine("smollm2") as engine:
        handle = engine.submit("What is the capital of France?", max_tokens=32)
        print(handle.result().text)
        print(engine.metrics())

Importing this package does not import MLX: a real model is loaded when an `Engine` asks for one.
"""
