"""EleutherAI's lm-eval: log likelihoods by completions, and generation by chats, on four questions of our
own."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import MODEL, V1, check

ROWS = [("France", "Paris"), ("Germany", "Berlin"), ("Italy", "Rome"), ("Spain", "Madrid")]
COMMON = "dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
CHOICE = COMMON + (
    "task: capitals\noutput_type: multiple_choice\ndoc_to_text: 'The capital of {{{{country}}}} "
    "is'\ndoc_to_target: '{{{{label}}}}'\ndoc_to_choice: '{{{{choices}}}}'\nmetric_list: [{{metric: "
    "acc}}]\n"
)
TEXT = COMMON + (
    "task: answers\noutput_type: generate_until\ndoc_to_text: 'What is the capital of {{{{country}}}}?'\n"
    "doc_to_target: '{{{{choices[label]}}}}'\n"
    "generation_kwargs: {{until: ['?'], max_gen_toks: 16}}\nmetric_list: [{{metric: exact_match}}]\n"
)
folder = Path(tempfile.mkdtemp())
data = folder / "capitals.jsonl"
rows = [
    {"country": country, "choices": [capital for _, capital in ROWS], "label": i}
    for i, (country, _) in enumerate(ROWS)
]
data.write_text("".join(json.dumps(row) + "\n" for row in rows))
(folder / "capitals.yaml").write_text(CHOICE.format(data=data))
(folder / "answers.yaml").write_text(TEXT.format(data=data))


def evaluated(kind: str, task: str, arguments: str, *more: str) -> dict[str, float]:
    command = [
        str(Path(sys.executable).parent / "lm_eval"),
        "run",
        "--model",
        kind,
        "--tasks",
        task,
        "--include_path",
        str(folder),
    ]
    command += [
        "--model_args",
        f"model={MODEL},num_concurrent=2,{arguments}",
        "--output_path",
        str(folder / f"{task}.json"),
        *more,
    ]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "OPENAI_API_KEY": "none",
    }
    made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr[-600:]
    (found,) = folder.glob(f"{task}*.json")
    return json.loads(found.read_text())["results"][task]


with check("log likelihoods (local-completions)"):
    tokenizer = f"tokenizer={os.environ['PENSTOCK_TOKENIZER']},base_url={V1}/completions"
    assert evaluated("local-completions", "capitals", tokenizer)["acc,none"] == 1.0
with check("chats (local-chat-completions)"):
    evaluated("local-chat-completions", "answers", f"base_url={V1}/chat/completions", "--apply_chat_template")
