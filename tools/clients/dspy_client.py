"""DSPy's LM: a chat, a forced tool, a schema, a streamed prediction."""

import asyncio
import sys

import dspy
from checks import KEY, MESSAGES, MODEL, NAMED, SCHEMA, TOOL, V1, check, fits, said

lm = dspy.LM(f"openai/{MODEL}", api_base=V1, api_key=KEY, max_tokens=96, temperature=0, cache=False)


async def streamed() -> str:
    """A model this small seldom writes what an adapter can read: what came until then is what counts."""
    program = dspy.streamify(dspy.Predict("question -> answer"), stream_listeners=[])
    parts = []
    try:
        async for part in program(question="What is the capital of France?"):
            parts.append(str(part))
    except Exception as error:
        print(type(error), file=sys.stderr)
    return "".join(parts)


with check("chat"):
    said(lm(messages=MESSAGES)[0])
with check("forced tool"):
    reply = lm(messages=MESSAGES, tools=[TOOL], tool_choice=NAMED)
    fits(reply[0]["tool_calls"][0].function.arguments)
with check("json_schema"):
    fits(lm(messages=MESSAGES, response_format=SCHEMA)[0])
with check("stream"), dspy.context(lm=lm):
    said(asyncio.run(streamed()))
