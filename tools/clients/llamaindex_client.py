"""LlamaIndex's OpenAILike."""

from typing import Literal

from checks import KEY, MODEL, QUESTION, V1, check, fits, said
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Weather(BaseModel):
    city: Literal["Paris", "Bern"]
    unit: Literal["C", "F"]


def weather(city: Literal["Paris", "Bern"], unit: Literal["C", "F"]) -> str:
    """The weather in a city"""
    return "21"


llm = OpenAILike(
    model=MODEL,
    api_base=V1,
    api_key=KEY,
    is_chat_model=True,
    is_function_calling_model=True,
    max_tokens=64,
    temperature=0,
)
TURNS = [ChatMessage(role="user", content=QUESTION)]
with check("chat"):
    said(llm.chat(TURNS).message.content)
with check("stream"):
    said("".join(part.delta or "" for part in llm.stream_chat(TURNS)))
with check("completions"):
    said(
        OpenAILike(model=MODEL, api_base=V1, api_key=KEY, max_tokens=16)
        .complete("The capital of France is")
        .text
    )
with check("forced tool"):
    reply = llm.chat_with_tools([FunctionTool.from_defaults(weather)], user_msg=QUESTION, tool_required=True)
    fits(llm.get_tool_calls_from_response(reply)[0].tool_kwargs)
with check("json_schema"):
    formed = OpenAILike(
        model=MODEL,
        api_base=V1,
        api_key=KEY,
        is_chat_model=True,
        should_use_structured_outputs=True,
        max_tokens=64,
        temperature=0,
    )
    fits(
        formed.structured_predict(
            Weather, __import__("llama_index.core", fromlist=["x"]).PromptTemplate(QUESTION)
        ).model_dump()
    )
