"""A short conversation as LiteLLM's users have it: `python tests/litellm_client.py URL MODEL…`.

The key comes in OPENAI_API_KEY. Run in a process of its own, which the settings of pytest do not reach; prints what
came back as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

# else it asks a public server for prices when it is imported
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from pydantic import BaseModel, Field

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says how the weather is in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


class Verdict(BaseModel):
    """What is thought of a parcel."""

    is_late: bool
    reason: str = Field(max_length=20)


def main(url: str, model: str) -> dict[str, Any]:
    """Talk, call a tool, ask for an object, and do something wrong."""

    def ask(messages: list[Any], **fields: Any) -> Any:
        options = {"temperature": 0, "num_retries": 0, "timeout": 120, **fields}
        return litellm.completion(model=f"openai/{model}", api_base=f"{url}/v1", messages=messages, **options)

    opening = [{"role": "system", "content": "You are a clerk."}, {"role": "user", "content": "Where is my parcel?"}]
    whole = ask(opening, max_tokens=12)
    chunks = [*ask(opening, max_tokens=12, stream=True, stream_options={"include_usage": True})]
    found = {
        "whole": whole.choices[0].message.content,
        "usage": whole.usage.model_dump(),
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "streamed_usage": [chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)],
        "tool": call_tool(ask),
        "verdict": json.loads(ask(opening, response_format=Verdict).choices[0].message.content),
    }
    try:
        ask(opening, extra_body={"no_such_field": 1})
    except litellm.BadRequestError as error:
        found["refusal"] = str(error)
    return found


def call_tool(ask: Any) -> dict[str, Any]:
    """Let the model call a tool, whole and streamed, and tell it what the tool said."""
    messages: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
    options = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    asked = ask(messages, **options).choices[0]
    streamed = litellm.stream_chunk_builder([*ask(messages, stream=True, **options)]).choices[0].message
    [call] = asked.message.tool_calls
    told = [*messages, asked.message, {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}]
    answer = ask(told, tools=[TOOL], tool_choice="none", max_tokens=8)
    return {
        "calls": [[one.function.name, json.loads(one.function.arguments)] for one in asked.message.tool_calls],
        "streamed": [[one.function.name, json.loads(one.function.arguments)] for one in streamed.tool_calls],
        "finish": asked.finish_reason,
        "answer": answer.choices[0].message.content,
        "prompt_tokens": answer.usage.prompt_tokens,
    }


if __name__ == "__main__":
    url, *models = sys.argv[1:]
    print(json.dumps({model: main(url, model) for model in models}))
