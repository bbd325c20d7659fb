"""CrewAI's LLM, and a crew of one agent."""

import os

os.environ |= {
    "CREWAI_TRACING_ENABLED": "false",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "OTEL_SDK_DISABLED": "true",
}
os.environ |= {"OPENAI_API_KEY": "none", "CREWAI_STORAGE_DIR": "penstock-clients"}

from typing import Literal

from checks import KEY, MESSAGES, MODEL, V1, check, fits, said
from crewai import LLM, Agent, Crew, Task
from pydantic import BaseModel


class Weather(BaseModel):
    city: Literal["Paris", "Bern"]
    unit: Literal["C", "F"]


def llm(**options):
    return LLM(model=f"openai/{MODEL}", base_url=V1, api_key=KEY, max_tokens=64, temperature=0, **options)


with check("chat"):
    said(llm().call(MESSAGES))
with check("stream"):
    said(llm(stream=True).call(MESSAGES))
with check("json_schema"):
    made = llm(response_format=Weather).call(MESSAGES)
    print()  # after its own words
    fits(made.model_dump() if isinstance(made, BaseModel) else made)
with check("a crew"):
    poet = Agent(role="Poet", goal="Write", backstory="A poet.", llm=llm(), max_iter=2, verbose=False)
    task = Task(description="Write a line on water.", expected_output="One line.", agent=poet)
    said(Crew(agents=[poet], tasks=[task], verbose=False).kickoff().raw)
