"""guidance, whose grammars of an answer become fields of a chat."""

import json

import guidance
from checks import KEY, MODEL, PARAMETERS, QUESTION, V1, check, fits, said
from guidance import assistant, gen, user
from guidance.models import OpenAI


def asked(what):
    lm = OpenAI(MODEL, api_key=KEY, base_url=V1)
    with user():
        lm += QUESTION
    with assistant():
        lm += what
    return lm


with check("chat"):
    said(asked(gen("answer", max_tokens=32))["answer"])
with check("json_schema"):
    fits(json.loads(asked(guidance.json("answer", schema=PARAMETERS, max_tokens=64))["answer"]))
