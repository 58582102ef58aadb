"""The engine: it takes requests, runs steps and gives tokens out.

    Engine (a thread, handles) ─► EngineCore.step: schedule, execute, publish, output

Owns the order in which the parts are asked, a request's way from submission to its end, and the thread that does it.
Must not know the rules of any policy, nor how a runner computes.

Read in this order: `input_processor` (what is refused), `core` (the step), `lifecycle` (arrival, output, end),
`sharing` (publication and coordination at each point of that way), `output`, `arrivals`; then `engine`, `worker` and
`handle`, which put a core on a thread. `invariants` says what must hold between two steps.
"""

from minivllm.engine.core import EngineCore
from minivllm.engine.engine import Engine
from minivllm.engine.handle import Handle, RequestResult, Token
from minivllm.engine.input_processor import Submission, chat_tokens
from minivllm.engine.notebook_cells import MadeByCell, current_cell
from minivllm.engine.output import Output
from minivllm.engine.registry import stop_all

__all__ = [
    "Engine",
    "EngineCore",
    "Handle",
    "MadeByCell",
    "Output",
    "RequestResult",
    "Submission",
    "Token",
    "chat_tokens",
    "current_cell",
    "stop_all",
]
