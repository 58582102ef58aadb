"""minivllm: a compact serving engine with prefix caching, built to be looked at.

    from minivllm import Engine

    with Engine("smollm2") as engine:
        handle = engine.submit("What is the capital of France?", max_tokens=32)
        print(handle.result().text)
        print(engine.metrics())

Importing this package does not import MLX: a real model is loaded when an `Engine` asks for one.
"""

from minivllm.config import EngineConfig
from minivllm.cost import CostModel
from minivllm.engine.core import EngineCore
from minivllm.engine.engine import Engine
from minivllm.engine.handle import Handle, RequestResult, Token
from minivllm.engine.input_processor import Submission
from minivllm.errors import (
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    InvariantError,
    MiniVLLMError,
    ModelError,
    UnknownNameError,
    UnknownRequestError,
)
from minivllm.log.kv_contents import kv_contents
from minivllm.log.metrics import Metrics
from minivllm.log.replay import replay
from minivllm.request import MultimodalItem, Sampling
from minivllm.runners.virtual import VirtualRunner

__all__ = [
    "ConfigError",
    "CostModel",
    "Engine",
    "EngineClosedError",
    "EngineConfig",
    "EngineCore",
    "EngineDeadError",
    "Handle",
    "InvalidRequestError",
    "InvariantError",
    "Metrics",
    "MiniVLLMError",
    "ModelError",
    "MultimodalItem",
    "RequestResult",
    "Sampling",
    "Submission",
    "Token",
    "UnknownNameError",
    "UnknownRequestError",
    "VirtualRunner",
    "kv_contents",
    "replay",
]
