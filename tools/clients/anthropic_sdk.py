"""Anthropic's own client: messages, streams, forced tools, schemas, counting tokens."""

import anthropic
from checks import DESCRIPTION, KEY, MESSAGES, MODEL, PARAMETERS, URL, check, fits, said

client = anthropic.Anthropic(base_url=URL, api_key=KEY)
# the newest versions have no field for it
TINY = {"model": MODEL, "max_tokens": 24, "extra_body": {"temperature": 0}}
TOOL = {"name": "weather", "description": DESCRIPTION, "input_schema": PARAMETERS}
FORCED = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}}

with check("chat"):
    message = client.messages.create(messages=MESSAGES, system="Be brief.", **TINY)
    assert "Paris" in message.content[0].text and message.usage.input_tokens
with check("stream"), client.messages.stream(messages=MESSAGES, **TINY) as stream:
    said("".join(stream.text_stream))
    assert stream.get_final_message().stop_reason
with check("forced tool"):
    message = client.messages.create(messages=MESSAGES, **FORCED, **TINY)
    (call,) = message.content
    fits(call.input)
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "21 C"}]}
    turns = [*MESSAGES, {"role": "assistant", "content": message.content}, result]
    said(client.messages.create(messages=turns, tools=[TOOL], **TINY).content[0].text)
with check("streamed tool"), client.messages.stream(messages=MESSAGES, **FORCED, **TINY) as stream:
    fits(stream.get_final_message().content[0].input)
with check("json_schema"):
    form = {"format": {"type": "json_schema", "schema": PARAMETERS}}
    fits(client.messages.create(messages=MESSAGES, output_config=form, **TINY).content[0].text)
with check("count_tokens"):
    assert client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens > 5
