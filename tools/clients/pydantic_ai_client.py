"""Pydantic AI: agents on chats, on responses and on Anthropic's messages."""

from typing import Literal

from anthropic import AsyncAnthropic
from checks import KEY, MODEL, QUESTION, URL, V1, check, fits, said
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings


class Weather(BaseModel):
    city: Literal["Paris", "Bern"]
    unit: Literal["C", "F"]


called: list[str] = []


def temperature(city: Literal["Paris", "Bern"]) -> str:
    """How warm it is in a city"""
    called.append(city)
    return "21"


def ended(agent: Agent) -> None:
    """Calls that fit, then an answer that does. A small model may go on calling: then its calls are what is
    looked at."""
    called.clear()
    try:
        fits(agent.run_sync(QUESTION, usage_limits=UsageLimits(request_limit=3)).output.model_dump())
    except UsageLimitExceeded:
        assert called
    assert set(called) <= {"Paris", "Bern"}, called


openai = OpenAIProvider(base_url=V1, api_key=KEY)
anthropic = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=URL, api_key=KEY))
SETTINGS = ModelSettings(max_tokens=96, temperature=0, parallel_tool_calls=False)
MODELS = {
    "": OpenAIChatModel(MODEL, provider=openai),
    "responses, ": OpenAIResponsesModel(MODEL, provider=openai),
    "anthropic, ": AnthropicModel(MODEL, provider=anthropic),
}
for name, model in MODELS.items():
    with check(f"{name}chat"):
        said(Agent(model, model_settings=SETTINGS).run_sync(QUESTION).output)
    with check(f"{name}stream"):
        with_stream = Agent(model, model_settings=SETTINGS).run_stream_sync(QUESTION)
        said(list(with_stream.stream_text())[-1])
    with check(f"{name}forced tool"):
        fits(
            Agent(model, output_type=ToolOutput(Weather), model_settings=SETTINGS)
            .run_sync(QUESTION)
            .output.model_dump()
        )
    with check(f"{name}tools and an output tool"):
        ended(Agent(model, output_type=Weather, tools=[temperature], model_settings=SETTINGS))
    if name != "anthropic, ":
        with check(f"{name}tools and a schema"):
            ended(
                Agent(model, output_type=NativeOutput(Weather), tools=[temperature], model_settings=SETTINGS)
            )
        with check(f"{name}json_schema"):
            fits(
                Agent(model, output_type=NativeOutput(Weather), model_settings=SETTINGS)
                .run_sync(QUESTION)
                .output.model_dump()
            )
