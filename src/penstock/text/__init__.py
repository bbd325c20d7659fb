"""From token ids to answers, on the reader's side: text, stop strings, reasoning and calls. Knows neither
HTTP nor the engine."""
