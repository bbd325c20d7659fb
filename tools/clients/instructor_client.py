"""Instructor: a pydantic object by a forced tool, and by a schema."""

from typing import Literal

import instructor
import openai
from checks import KEY, MESSAGES, MODEL, V1, check, fits
from pydantic import BaseModel


class Weather(BaseModel):
    city: Literal["Paris", "Bern"]
    unit: Literal["C", "F"]


for name, mode in (("forced tool", instructor.Mode.TOOLS), ("json_schema", instructor.Mode.JSON_SCHEMA)):
    client = instructor.from_openai(openai.OpenAI(base_url=V1, api_key=KEY), mode=mode)
    with check(name):
        fits(
            client.chat.completions.create(
                model=MODEL, messages=MESSAGES, response_model=Weather, max_tokens=64
            ).model_dump()
        )
    with check(f"{name}, streamed"):
        parts = client.chat.completions.create_partial(
            model=MODEL, messages=MESSAGES, response_model=Weather, max_tokens=64
        )
        fits(list(parts)[-1].model_dump())
