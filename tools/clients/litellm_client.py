"""LiteLLM: OpenAI's route, Anthropic's route and responses, by its prefixes."""

import litellm
from checks import KEY, MESSAGES, MODEL, NAMED, QUESTION, SCHEMA, TOOL, URL, V1, check, fits, said

OPENAI = {"model": f"openai/{MODEL}", "api_base": V1, "api_key": KEY, "max_tokens": 24, "temperature": 0}
ANTHROPIC = {**OPENAI, "model": f"anthropic/{MODEL}", "api_base": URL}

for name, options in (("", OPENAI), ("anthropic/, ", ANTHROPIC)):
    with check(f"{name}chat"):
        said(litellm.completion(messages=MESSAGES, **options).choices[0].message.content)
    with check(f"{name}stream"):
        said(
            "".join(
                chunk.choices[0].delta.content or ""
                for chunk in litellm.completion(messages=MESSAGES, stream=True, **options)
            )
        )
    with check(f"{name}forced tool"):
        reply = litellm.completion(messages=MESSAGES, tools=[TOOL], tool_choice=NAMED, **options)
        fits(reply.choices[0].message.tool_calls[0].function.arguments)
with check("json_schema"):
    fits(litellm.completion(messages=MESSAGES, response_format=SCHEMA, **OPENAI).choices[0].message.content)
with check("responses"):
    reply = litellm.responses(
        model=f"openai/{MODEL}", api_base=V1, api_key=KEY, input=QUESTION, max_output_tokens=24
    )
    said(reply.output[0].content[0].text)
with check("too long a prompt is known as that"):
    try:
        litellm.completion(messages=[{"role": "user", "content": "a b " * 50_000}], **OPENAI)
        raise AssertionError("it was taken")
    except litellm.ContextWindowExceededError:
        pass
