"""OpenAI's Agents SDK, on responses (its default) and on chats."""

import asyncio
import contextlib
from typing import Any, Literal

from agents import (
    Agent,
    MaxTurnsExceeded,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import KEY, MODEL, QUESTION, V1, check, fits, said
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent
from pydantic import BaseModel

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=V1, api_key=KEY)
called: list[dict[str, str]] = []


class Weather(BaseModel):
    city: Literal["Paris", "Bern"]
    unit: Literal["C", "F"]


@function_tool
def weather(city: Literal["Paris", "Bern"], unit: Literal["C", "F"]) -> str:
    """The weather in a city"""
    called.append({"city": city, "unit": unit})
    return "21"


async def streamed(agent: Agent) -> str:
    result = Runner.run_streamed(agent, QUESTION)
    events = [event async for event in result.stream_events()]
    return "".join(
        event.data.delta
        for event in events
        if isinstance(getattr(event, "data", None), ResponseTextDeltaEvent)
    )


async def ended(model: Model, streamed: bool = False, **settings: Any) -> Any:
    """What an agent with a tool and a schema answers; its calls and its answer fit. A small model may go on
    calling: then there is none."""
    called.clear()
    given = ModelSettings(max_tokens=96, temperature=0, parallel_tool_calls=False, **settings)
    agent = Agent("both", model=model, tools=[weather], output_type=Weather, model_settings=given)
    answer = None
    with contextlib.suppress(MaxTurnsExceeded):
        result = (
            Runner.run_streamed(agent, QUESTION, max_turns=3)
            if streamed
            else await Runner.run(agent, QUESTION, max_turns=3)
        )
        if streamed:
            async for _ in result.stream_events():
                pass
        answer = result.final_output
    for arguments in (*called, *([] if answer is None else [answer.model_dump()])):
        fits(arguments)
    assert called or answer is not None
    return answer


async def tried(name: str, kind: type) -> None:
    model = kind(MODEL, client)
    plain = Agent("plain", model=model, model_settings=ModelSettings(max_tokens=32, temperature=0))
    with check(name):
        said((await Runner.run(plain, QUESTION)).final_output)
    with check(f"{name}, streamed"):
        said(await streamed(plain))
    with check(f"{name}, forced tool"):
        called.clear()
        settings = ModelSettings(max_tokens=64, temperature=0, tool_choice="weather")
        result = await Runner.run(
            Agent("caller", model=model, tools=[weather], model_settings=settings), QUESTION
        )
        fits(called[0])
        said(result.final_output)
    with check(f"{name}, json_schema"):
        settings = ModelSettings(max_tokens=64, temperature=0)
        formed = Agent("formed", model=model, output_type=Weather, model_settings=settings)
        fits((await Runner.run(formed, QUESTION)).final_output.model_dump())
    with check(f"{name}, tools and a schema"):
        await ended(model)
    with check(f"{name}, tools and a schema, streamed"):
        await ended(model, streamed=True)
    with check(f"{name}, a forced tool beside a schema"):
        await ended(model, tool_choice="required")
        assert called
    with check(f"{name}, a schema, and tools that must not be called"):
        assert await ended(model, tool_choice="none") is not None and not called


async def main() -> None:
    await tried("responses", OpenAIResponsesModel)
    await tried("chat", OpenAIChatCompletionsModel)


asyncio.run(main())
