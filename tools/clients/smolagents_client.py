"""smolagents: its model, streaming, and a tool that it requires."""

from checks import DESCRIPTION, KEY, MESSAGES, MODEL, SCHEMA, V1, check, fits, said
from smolagents import OpenAIServerModel, Tool


class Weather(Tool):
    name = "weather"
    description = DESCRIPTION
    inputs = {  # noqa: RUF012
        "city": {"type": "string", "description": "Where", "enum": ["Paris", "Bern"]},
        "unit": {"type": "string", "description": "In what", "enum": ["C", "F"]},
    }
    output_type = "string"

    def forward(self, city: str, unit: str) -> str:
        return "21"


model = OpenAIServerModel(model_id=MODEL, api_base=V1, api_key=KEY, max_tokens=64, temperature=0)
TURNS = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
with check("chat"):
    said(model.generate(TURNS).content)
with check("stream"):
    said("".join(delta.content or "" for delta in model.generate_stream(TURNS)))
with check("forced tool"):
    fits(model.generate(TURNS, tools_to_call_from=[Weather()]).tool_calls[0].function.arguments)
with check("json_schema"):
    fits(model.generate(TURNS, response_format=SCHEMA).content)
