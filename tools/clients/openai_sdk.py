"""OpenAI's own client: chats, completions, responses, streams, forced tools, schemas."""

import openai
from checks import (
    DESCRIPTION,
    KEY,
    MESSAGES,
    MODEL,
    NAMED,
    PARAMETERS,
    QUESTION,
    SCHEMA,
    TOOL,
    V1,
    check,
    fits,
    said,
)

client = openai.OpenAI(base_url=V1, api_key=KEY)
TINY = {"model": MODEL, "max_tokens": 24, "temperature": 0}

with check("chat"):
    reply = client.chat.completions.create(messages=MESSAGES, **TINY)
    assert "Paris" in reply.choices[0].message.content and reply.usage.completion_tokens
with check("stream"):
    stream = client.chat.completions.create(
        messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **TINY
    )
    chunks = list(stream)
    said("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
    assert chunks[-1].usage.prompt_tokens
with check("completions"):
    said(client.completions.create(prompt="The capital of France is", **TINY).choices[0].text)
with check("forced tool"):
    reply = client.chat.completions.create(messages=MESSAGES, tools=[TOOL], tool_choice=NAMED, **TINY)
    (call,) = reply.choices[0].message.tool_calls
    fits(call.function.arguments)
    turns = [
        *MESSAGES,
        reply.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "21 C"},
    ]
    said(client.chat.completions.create(messages=turns, tools=[TOOL], **TINY).choices[0].message.content)
with check("streamed tool"):
    stream = client.chat.completions.create(
        messages=MESSAGES, tools=[TOOL], tool_choice="required", stream=True, **TINY | {"max_tokens": 64}
    )
    fits(
        "".join(
            call.function.arguments or ""
            for chunk in stream
            for call in chunk.choices[0].delta.tool_calls or ()
        )
    )
with check("json_schema"):
    fits(
        client.chat.completions.create(messages=MESSAGES, response_format=SCHEMA, **TINY)
        .choices[0]
        .message.content
    )

NEW = {"model": MODEL, "max_output_tokens": 24, "temperature": 0}
FUNCTION = {
    "type": "function",
    "name": "weather",
    "description": DESCRIPTION,
    "parameters": PARAMETERS,
    "strict": True,
}
with check("responses"):
    assert "Paris" in client.responses.create(input=QUESTION, **NEW).output_text
with check("responses, streamed"), client.responses.stream(input=QUESTION, **NEW) as stream:
    said("".join(event.delta for event in stream if event.type == "response.output_text.delta"))
    said(stream.get_final_response().output_text)
with check("responses, forced tool"):
    choice = {"type": "function", "name": "weather"}
    response = client.responses.create(input=QUESTION, tools=[FUNCTION], tool_choice=choice, **NEW)
    (call,) = response.output
    fits(call.arguments)
    turns = [*MESSAGES, call, {"type": "function_call_output", "call_id": call.call_id, "output": "21 C"}]
    said(client.responses.create(input=turns, tools=[FUNCTION], **NEW).output_text)
with check("responses, json_schema"):
    form = {"format": {"type": "json_schema", "name": "weather", "schema": PARAMETERS, "strict": True}}
    fits(client.responses.create(input=QUESTION, text=form, **NEW).output_text)
