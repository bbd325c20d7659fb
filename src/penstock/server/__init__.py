"""The HTTP front: OpenAI-compatible routes over an engine. The only place that imports web packages; owns no
model and no KV."""
