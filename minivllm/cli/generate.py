"""`minivllm generate`: answer a prompt, token by token."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from minivllm.cli.arguments import add_command, number, whole
from minivllm.cli.console import MODEL_HELP, Console, bring_model
from minivllm.engine.handle import Handle
from minivllm.errors import InvalidRequestError

_GENERATE = """\
Answer a prompt with a real model, token by token.

The text goes to standard output; a line with the number of tokens, the time to the first one (TTFT) and the speed
goes to standard error. The prompt is put into the model's chat template, unless --raw is given."""

_GENERATE_EXAMPLES = """\
examples:
  minivllm generate "What is the capital of France?"
  minivllm generate "Write a haiku about rain." --temperature 0.8 --seed 1 --max-tokens 60
  minivllm generate --raw "Once upon a time" --stop "."
  minivllm generate - < question.txt
  minivllm generate "Hello" --json"""


def add_to(commands: Any) -> None:
    """Add the command to the command line."""
    made = add_command(commands, "generate", generate, _GENERATE, _GENERATE_EXAMPLES)
    made.add_argument("prompt", metavar="PROMPT", help='what the model answers; "-" reads it from standard input')
    made.add_argument("--model", default="smollm2", metavar="NAME", help=MODEL_HELP)
    made.add_argument("--max-tokens", type=whole, default=32, metavar="N", help="most output tokens (default: 32)")
    made.add_argument(
        "--temperature",
        type=number,
        default=0.0,
        metavar="T",
        help="0 takes the likeliest token; above, tokens are drawn (default: 0)",
    )
    made.add_argument(
        "--top-p",
        type=number,
        default=1.0,
        metavar="P",
        help="draw from the likeliest tokens that sum to P, a share above 0 up to 1 (default: 1, all)",
    )
    made.add_argument(
        "--top-k", type=whole, default=0, metavar="K", help="draw from the K likeliest tokens (default: 0, all)"
    )
    made.add_argument("--seed", type=whole, metavar="N", help="makes draws repeat (default: 0 for the first request)")
    made.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end at this text, which is left out; may be given several times (default: none)",
    )
    made.add_argument(
        "--blocks", type=whole, default=512, metavar="N", help="blocks of 16 tokens in the pool (default: 512)"
    )
    made.add_argument("--raw", action="store_true", help="continue the prompt as it is, with no chat template")
    made.add_argument("--json", action="store_true", help="print the text, token ids and times (ms) as JSON")


def generate(args: argparse.Namespace, console: Console) -> None:
    """Answer a prompt, token by token."""
    from minivllm.engine.engine import Engine
    from minivllm.request import Sampling

    sampling = Sampling(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        stop=tuple(args.stop),
    )
    prompt = _read_prompt() if args.prompt == "-" else args.prompt
    if not prompt:
        raise InvalidRequestError("the prompt is empty; write something to continue")
    with console.progress() as progress:
        bring_model(args.model, console, progress)
        engine = Engine(args.model, num_blocks=args.blocks, progress=progress)
    with engine:
        submit = engine.submit if args.raw else engine.chat
        handle = submit(prompt, sampling=sampling)
        if not args.json:
            _stream(handle, console)
        result = handle.result()
    if args.json:
        figures = {
            "model": args.model,
            "prompt": prompt,
            "text": result.text,
            "token_ids": list(result.token_ids),
            "finish_reason": result.finish_reason,
            "prompt_tokens": result.prompt_tokens,
            "recovered_tokens": result.recovered_tokens,
            "output_tokens": len(result.token_ids),
            "ttft_ms": result.ttft_ms,
            "completion_ms": result.completion_ms,
        }
        console.out.line(json.dumps(figures, ensure_ascii=False, indent=2))
    why = {"length": "max-tokens reached", "stop": "end of the answer"}.get(result.finish_reason, "")
    ttft, completion = result.ttft_ms or 0.0, result.completion_ms or 0.0
    rate = f", {(len(result.token_ids) - 1) / (completion - ttft) * 1000:.1f} tokens/s" if completion > ttft else ""
    console.notes.line(
        f"[{result.prompt_tokens:,} prompt tokens, {len(result.token_ids):,} output tokens ({why}), "
        f"TTFT {ttft:,.0f} ms{rate}]"
    )


def _read_prompt() -> str:
    if sys.stdin is None:
        raise InvalidRequestError("the prompt is to be read from standard input, which is closed; open it")
    return sys.stdin.buffer.read().decode("utf-8", "replace")


def _stream(handle: Handle, console: Console) -> None:
    """Write the text as it comes, and end the line whatever happens."""
    last = ""
    try:
        for token in handle:
            if token.text:
                console.out.write(token.text)
                last = token.text
    finally:
        if not last.endswith("\n") and console.out.stream is not None:
            console.out.line()
