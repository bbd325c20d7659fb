"""Pydantic AI: agents on chats, on responses and on Anthropic's messages."""

from typing import Literal

from anthropic import AsyncAnthropic
from checks import KEY, MODEL, QUESTION, URL, V1, check, fits, said
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings


class Weather(BaseModel):
    city: Literal["Paris", "Bern"]
    unit: Literal["C", "F"]


openai = OpenAIProvider(base_url=V1, api_key=KEY)
anthropic = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=URL, api_key=KEY))
SETTINGS = ModelSettings(max_tokens=64, temperature=0)
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
        fits(Agent(model, output_type=ToolOutput(Weather), model_settings=SETTINGS).run_sync(QUESTION).output.model_dump())
    if name != "anthropic, ":
        with check(f"{name}json_schema"):
            fits(Agent(model, output_type=NativeOutput(Weather), model_settings=SETTINGS).run_sync(QUESTION).output.model_dump())
