"""LangChain: ChatOpenAI, ChatAnthropic."""

from typing import Literal

from checks import KEY, MODEL, QUESTION, URL, V1, check, fits, said
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather in a city"""

    city: Literal["Paris", "Bern"]
    unit: Literal["C", "F"]


@tool
def weather(city: Literal["Paris", "Bern"], unit: Literal["C", "F"]) -> str:
    """The weather in a city"""
    return "21"


OPENAI = ChatOpenAI(base_url=V1, api_key=KEY, model=MODEL, max_tokens=48, temperature=0)
RESPONSES = ChatOpenAI(
    base_url=V1, api_key=KEY, model=MODEL, max_tokens=48, temperature=0, use_responses_api=True
)
ANTHROPIC = ChatAnthropic(base_url=URL, api_key=KEY, model=MODEL, max_tokens=48, temperature=0)

for name, model in (("", OPENAI), ("responses, ", RESPONSES), ("ChatAnthropic, ", ANTHROPIC)):
    with check(f"{name}chat"):
        said(model.invoke(QUESTION).text)
    with check(f"{name}stream"):
        said("".join(chunk.text for chunk in model.stream(QUESTION)))
    with check(f"{name}forced tool"):
        bound = model.bind_tools([weather], tool_choice="weather")
        reply = bound.invoke(QUESTION)
        (call,) = reply.tool_calls
        fits(call["args"])
        result = ToolMessage("21 C", tool_call_id=call["id"])
        said(model.bind_tools([weather]).invoke([("user", QUESTION), reply, result]).text)
    with check(f"{name}json_schema"):
        fits(model.with_structured_output(Weather, method="json_schema").invoke(QUESTION).model_dump())
