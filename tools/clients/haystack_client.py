"""Haystack's generators for OpenAI's API."""

import json

from checks import KEY, MODEL, PARAMETERS, QUESTION, SCHEMA, V1, check, fits, said
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret

TURNS = [ChatMessage.from_user(QUESTION)]
WEATHER = Tool(
    name="weather",
    description="The weather in a city",
    parameters=PARAMETERS,
    function=lambda city, unit: "21",
)


def asked(kind, **options):
    settings = {"max_tokens": 64, "temperature": 0} if kind is OpenAIChatGenerator else {"temperature": 0}
    made = kind(
        api_key=Secret.from_token(KEY), model=MODEL, api_base_url=V1,
        generation_kwargs={**settings, **options.pop("generation_kwargs", {})}, **options,
    )  # fmt: skip
    return made.run(TURNS)["replies"][0]


NAMED = {"type": "function", "function": {"name": "weather"}}
with check("chat"):
    said(asked(OpenAIChatGenerator).text)
with check("stream"):
    pieces = []
    asked(OpenAIChatGenerator, streaming_callback=lambda chunk: pieces.append(chunk.content or ""))
    said("".join(pieces))
with check("forced tool"):
    reply = asked(OpenAIChatGenerator, tools=[WEATHER], generation_kwargs={"tool_choice": NAMED})
    fits(reply.tool_calls[0].arguments)
with check("json_schema"):
    fits(json.loads(asked(OpenAIChatGenerator, generation_kwargs={"response_format": SCHEMA}).text))
with check("responses, chat"):
    said(asked(OpenAIResponsesChatGenerator, generation_kwargs={"max_output_tokens": 64}).text)
with check("responses, forced tool"):
    forced = {"tool_choice": {"type": "function", "name": "weather"}, "max_output_tokens": 64}
    fits(
        asked(OpenAIResponsesChatGenerator, tools=[WEATHER], generation_kwargs=forced).tool_calls[0].arguments
    )
