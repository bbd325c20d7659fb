"""OpenAI's Agents SDK, on responses (its default) and on chats."""

import asyncio
from typing import Literal

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
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
    return "".join(event.data.delta for event in events if isinstance(getattr(event, "data", None), ResponseTextDeltaEvent))


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
        result = await Runner.run(Agent("caller", model=model, tools=[weather], model_settings=settings), QUESTION)
        fits(called[0])
        said(result.final_output)
    with check(f"{name}, json_schema"):
        settings = ModelSettings(max_tokens=64, temperature=0)
        formed = Agent("formed", model=model, output_type=Weather, model_settings=settings)
        fits((await Runner.run(formed, QUESTION)).final_output.model_dump())


async def main() -> None:
    await tried("responses", OpenAIResponsesModel)
    await tried("chat", OpenAIChatCompletionsModel)


asyncio.run(main())
