"""A short conversation as LangChain's users have it: `python tests/langchain_client.py URL MODEL…`.

The key comes in OPENAI_API_KEY. Run in a process of its own, which the settings of pytest do not reach; prints what
came back as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Weather(BaseModel):
    """Says how the weather is in a city."""

    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=7)


class Verdict(BaseModel):
    """What is thought of a parcel."""

    is_late: bool
    reason: str = Field(max_length=20)


def main(url: str, model: str) -> dict[str, Any]:
    """Talk, call a tool, and ask for an object."""
    chat = ChatOpenAI(base_url=f"{url}/v1", model=model, temperature=0, max_retries=0, timeout=120, stream_usage=True)
    opening = [SystemMessage("You are a clerk."), HumanMessage("Where is my parcel?")]
    short = chat.bind(max_tokens=12)
    whole = short.invoke(opening)
    pieces = [*short.stream(opening)]
    return {
        "whole": whole.text,
        "usage": whole.usage_metadata,
        "streamed": "".join(piece.text for piece in pieces),
        "streamed_usage": [piece.usage_metadata for piece in pieces if piece.usage_metadata],
        "tool": call_tool(chat, [HumanMessage("How is the weather in Paris?")]),
        "verdict": chat.with_structured_output(Verdict, method="json_schema").invoke(opening).model_dump(),
        "verdict_by_tool": chat.with_structured_output(Verdict, method="function_calling").invoke(opening).model_dump(),
    }


def call_tool(chat: ChatOpenAI, messages: list[BaseMessage]) -> dict[str, Any]:
    """Let the model call a tool, whole and streamed, and tell it what the tool said."""
    binding = chat.bind_tools([Weather], tool_choice="any", parallel_tool_calls=False)
    asked = binding.invoke(messages)
    streamed = None
    for piece in binding.stream(messages):
        streamed = piece if streamed is None else streamed + piece
    assert isinstance(asked, AIMessage)
    assert streamed is not None
    [call] = asked.tool_calls
    told = [*messages, asked, ToolMessage("18 degrees", tool_call_id=call["id"])]
    answer = chat.bind_tools([Weather], tool_choice="none", max_tokens=8).invoke(told)
    return {
        "calls": [[one["name"], Weather(**one["args"]).model_dump()] for one in asked.tool_calls],
        "streamed": [[one["name"], Weather(**one["args"]).model_dump()] for one in streamed.tool_calls],
        "finish": asked.response_metadata["finish_reason"],
        "answer": answer.text,
        "prompt_tokens": answer.usage_metadata["input_tokens"],
    }


if __name__ == "__main__":
    url, *models = sys.argv[1:]
    print(json.dumps({model: main(url, model) for model in models}))
