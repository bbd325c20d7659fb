"""Trains a multi-token-prediction head for a model on what the model itself writes. Owns the order of the
work, its files, and the questions; the mathematics is `training.py`.

The target is asked three kinds of questions, so that a head meets what users send: from templates, made up by
the target itself, and tasks over texts that it wrote before.
"""

from __future__ import annotations

import itertools
import json
import queue
import random
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from penstock.answer import running_engine
from penstock.config import Config
from penstock.contract import FinishReason, SamplingParams, Submission, TokenEvent
from penstock.engine.build import device_for
from penstock.engine.engine import Engine
from penstock.errors import ConfigError, StepFailed
from penstock.models.decoder import Decoder
from penstock.models.layers import TorchLayerOps
from penstock.models.loader import load_model
from penstock.models.progress import Progress
from penstock.progress import ProgressBar
from penstock.speculation.mtp import TENSORS_FILE, write_head
from penstock.speculation.vocab import DraftVocab
from train_mtp.training import (
    Acceptance,
    Batch,
    Text,
    Trainable,
    Training,
    TrainingConfig,
    batches,
    by_clock,
    by_steps,
    measured_acceptance,
    token_counts,
    train,
)

WRITING = 0.4  # share of the time for the text
MEASURING = 0.06  # and for measuring at the end
_MIN_TRAIN_VOCAB = (
    16384  # tokens that a head is trained over at least: smaller draft vocabularies are cut from it
)
_MEASURED_VOCABS = (4096, 8192, 16384)
_SAVE_S = 60.0
_TEMPERATURES = (0.0, 0.0, 0.6, 0.8, 1.0)
_WAIT_S = 60.0  # for any request to end
_CUDA_KV_GIB = 16.0  # of the engine that writes


@dataclass(frozen=True, slots=True)
class TrainTask:
    """What was asked for."""

    out: Path
    minutes: float = 6.0
    steps: int | None = None  # None: as many as the time allows
    text_file: Path | None = None
    max_tokens: int = 6_000_000  # of text
    draft_vocab: int = 16384  # 0: the whole vocabulary
    work: Path | None = None  # where text and state are kept; None: inside `out`, and removed at the end
    training: TrainingConfig = field(default_factory=TrainingConfig)


@dataclass(frozen=True, slots=True)
class Corpus:
    training: list[Text]
    held_out: list[Text]


def train_mtp(config: Config, task: TrainTask) -> int:
    started_s = time.monotonic()
    work = task.work or task.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    _check_same(work, config, task)
    corpus = _corpus(config, task, work, started_s + 60 * task.minutes * WRITING)
    with ProgressBar() as bar:
        target = load_target(config, bar)
        counts = token_counts(corpus.training, target.config.vocab)
        vocab = (
            None if task.draft_vocab == 0 else _draft_vocab(counts, max(task.draft_vocab, _MIN_TRAIN_VOCAB))
        )
        head = Trainable(target, vocab, task.training.seed)
        learned = batches(corpus.training, target, task.training, bar)
        _print(
            f"{sum(map(_length, corpus.training)):,} tokens of {len(corpus.training):,} texts to learn "
            f"from; {_since(started_s)}"
        )
        file = work / "state.pt"
        state = (
            torch.load(file, map_location=target.device, weights_only=True)
            if file.is_file()
            else {"share": 0.0}
        )
        end_s = started_s + 60 * task.minutes * (1 - MEASURING)
        done = (
            by_clock(end_s - time.monotonic(), state["share"]) if task.steps is None else by_steps(task.steps)
        )
        training = Training(head, learned, task.training, done)
        if "step" in state:
            training.restore(state)
            _print(f"going on behind step {training.step}")

        def keep() -> None:
            _save(file, training.state())
            _write(task, training, counts, {})

        _run(training, keep, bar)
        measured = _measured(
            head, batches(corpus.held_out, target, task.training, bar), counts, task.draft_vocab
        )
    _report(measured, counts, token_counts(corpus.held_out, target.config.vocab), head)
    _write(
        task,
        training,
        counts,
        {name: [round(rate, 4) for rate in found.rates] for name, found in measured.items()},
    )
    _print(
        f"{task.out / TENSORS_FILE}: {(task.out / TENSORS_FILE).stat().st_size / 1e6:.1f} MB; "
        f"{_since(started_s)}"
    )
    if task.work is None:
        shutil.rmtree(work)
    return 0


def _check_same(work: Path, config: Config, task: TrainTask) -> None:
    """What an earlier run has left in `work` is gone on from where it was of the same model and text. Raises
    ConfigError."""
    model, text, training = Path(config.source.model), task.text_file, task.training
    of = {
        "--model": str(model.resolve()) if model.exists() else str(model),
        "--text": None
        if text is None
        else f"{text.resolve()}, {text.stat().st_size if text.exists() else 0} bytes",
        "--text-len": training.max_len,
        "--depth": training.depth,
        "--draft-vocab": task.draft_vocab
        and max(task.draft_vocab, _MIN_TRAIN_VOCAB),  # smaller ones are cut from that
    }
    file = work / "of.json"
    if file.is_file():
        before = json.loads(file.read_text())
        other = ", ".join(f"{name} {before.get(name)}" for name in of if before.get(name) != of[name])
        if other:
            raise ConfigError(
                f"{work} has the text and state of a run with {other}: remove it, or give another directory "
                "with --work"
            )
    file.write_text(json.dumps(of))


def load_target(config: Config, progress: Progress) -> Decoder:
    """Dense, in plain PyTorch: gradients pass through copies of its layers."""
    device = device_for(config)
    wide = {
        "auto": torch.bfloat16 if device.type == "cuda" else torch.float32,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
    }
    dtype = wide[config.source.dtype]
    source = replace(
        config.source, weights="float32" if device.type == "cpu" and dtype == torch.float32 else "auto"
    )
    return load_model(source, device, dtype, TorchLayerOps(), progress, config.engine.max_model_len).model


def most_frequent(counts: torch.Tensor, size: int) -> DraftVocab:
    """The `size` most frequent tokens; of equals the lower ids."""
    ids = counts.sort(descending=True, stable=True).indices[:size]
    return DraftVocab(ids.sort().values, len(counts), "token statistics")


def _covered(counts: torch.Tensor, vocab: DraftVocab) -> float:
    """Share of the counted tokens that can be proposed."""
    return int(counts[vocab.target_ids].sum()) / max(1, int(counts.sum()))


def _draft_vocab(counts: torch.Tensor, size: int) -> DraftVocab | None:
    return None if size == 0 or size >= len(counts) else most_frequent(counts, size)


def _write(
    task: TrainTask, training: Training, counts: torch.Tensor, acceptance: Mapping[str, Sequence[float]]
) -> None:
    """The head as it is now."""
    notes = {
        "text_tokens": int(counts.sum()),
        "steps": training.step,
        "seed": task.training.seed,
        "acceptance": dict(acceptance),
    }
    head = training.head
    write_head(
        task.out,
        head.stored(),
        _draft_vocab(counts, task.draft_vocab),
        head.target,
        task.training.depth,
        notes,
    )


def _run(training: Training, keep: Callable[[], None], progress: Progress) -> None:
    """`keep` is called now and then: a run that is ended leaves a head, and can be continued."""
    first, began_s = training.step, time.monotonic()
    saved_s = began_s

    def each(training: Training) -> bool:
        nonlocal saved_s
        now_s = time.monotonic()
        if now_s - saved_s > _SAVE_S:
            keep()
            saved_s = now_s
        return False

    losses = train(training, progress, each)
    keep()
    num = training.step - first
    _print(f"{num} steps of {1000 * (time.monotonic() - began_s) / num:.0f} ms")
    shown = [
        sum(losses[i : i + 20]) / len(losses[i : i + 20])
        for i in range(0, len(losses), max(20, len(losses) // 8))
    ]
    _print("loss: " + "  ".join(f"{loss:.3f}" for loss in shown))


def _save(file: Path, state: Mapping[str, Any]) -> None:
    """Whole or not at all: a run may be ended at any time."""
    partial = file.with_suffix(".partial")
    torch.save(dict(state), partial)
    partial.replace(file)


# ------------------------------------------------------------------------------------------------- acceptance


def _measured(
    head: Trainable, held_out: Sequence[Batch], counts: torch.Tensor, chosen: int
) -> dict[str, Acceptance]:
    """By draft vocabulary, the chosen one among them; one place further than the head was unrolled for."""
    sizes = sorted({size for size in (*_MEASURED_VOCABS, chosen) if 0 < size < len(counts)})
    vocabs = {str(size): most_frequent(counts, size).to(head.target.device) for size in sizes}
    return measured_acceptance(head, held_out, 4, {**vocabs, "full": None})


def _report(
    measured: Mapping[str, Acceptance], counts: torch.Tensor, held_out: torch.Tensor, head: Trainable
) -> None:
    _print(
        "greedy drafts that are kept, on text that was not trained on: 1st, 2nd where the 1st was, and so on"
    )
    width = head.dims.hidden * head.target.dtype.itemsize
    for name, found in measured.items():
        size = len(counts) if name == "full" else int(name)
        covers = 1.0 if name == "full" else _covered(held_out, most_frequent(counts, size))
        _print(
            f"draft vocabulary {name:>6}  {found.line()}   {size * width / 1e6:.1f} MB of output rows, "
            f"covers {covers:.1%} of that text"
        )


# ------------------------------------------------------------------------------------------------------- text


def _corpus(config: Config, task: TrainTask, work: Path, end_s: float) -> Corpus:
    file = work / "texts.pt"
    if file.is_file():
        return _read_corpus(file)
    with running_engine(_for_writing(config, task)) as engine:
        if task.text_file is None:
            corpus = Writer(engine, task, config.engine.max_batch, end_s).write()
        else:
            corpus = _from_file(engine, task)
    if not corpus.training or not corpus.held_out:
        raise ConfigError(
            "there is too little text to train on and to measure with; give more time, or more text"
        )
    _save(
        file,
        {
            name: _packed(texts)
            for name, texts in (("training", corpus.training), ("held_out", corpus.held_out))
        },
    )
    return corpus


def _for_writing(config: Config, task: TrainTask) -> Config:
    """Device memory is bounded: the training needs some of it afterwards."""
    device_gib = config.kv.device_gib
    if device_gib is None and config.kv.device_blocks is None and device_for(config).type == "cuda":
        device_gib = _CUDA_KV_GIB
    return replace(
        config,
        kv=replace(config.kv, device_gib=device_gib),
        engine=replace(config.engine, max_model_len=config.engine.max_model_len or task.training.max_len),
    )


def _packed(texts: Sequence[Text]) -> dict[str, torch.Tensor]:
    return {
        "tokens": torch.tensor([token for text in texts for token in text.tokens], dtype=torch.int32),
        "lengths": torch.tensor([len(text.tokens) for text in texts]),
        "prompts": torch.tensor([text.num_prompt for text in texts]),
    }


def _read_corpus(file: Path) -> Corpus:
    stored, found = torch.load(file, weights_only=True), {}
    for name in ("training", "held_out"):
        pieces = stored[name]["tokens"].tolist()
        ends = stored[name]["lengths"].cumsum(0).tolist()
        starts = [0, *ends[:-1]]
        prompts = stored[name]["prompts"].tolist()
        found[name] = [Text(pieces[a:b], prompt) for a, b, prompt in zip(starts, ends, prompts, strict=True)]
    return Corpus(found["training"], found["held_out"])


def _from_file(engine: Engine, task: TrainTask) -> Corpus:
    """Stretches of a text file. One in twenty is for measuring; the target did not write it, so few of its
    tokens are the likeliest."""
    assert task.text_file is not None
    try:
        tokens = engine.tokenizer.encode(task.text_file.read_text())[: task.max_tokens]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {task.text_file} cannot be read: {error}") from error
    size = task.training.max_len
    pieces = [Text(tokens[i : i + size], 0) for i in range(0, len(tokens), size)]
    held_out = pieces[::20] if len(pieces) > 1 else []
    return Corpus([piece for n, piece in enumerate(pieces) if n % 20], held_out)


@dataclass(slots=True)
class _TextAsked:
    """A request that is being answered."""

    prompt: list[int]
    question: str  # "": the target makes up a question itself
    tokens: list[int] = field(default_factory=list)
    held_out: bool = False


class Writer:
    """Has the engine write text, as many requests at once as its batch has rows. What was asked and answered
    is the text."""

    def __init__(self, engine: Engine, task: TrainTask, max_batch: int, end_s: float) -> None:
        self._engine, self._task, self._end_s = engine, task, end_s
        self._most_open = 2 * max_batch  # so that a row that gets free is taken at once
        self._num_asking = 0  # requests under way in which the target makes up a question
        self._chooser = random.Random(task.training.seed)
        self._questions = questions(task.training.seed)
        self._made_up: list[str] = []  # questions of the target's own
        self._written: list[str] = []  # texts to ask about
        self._done: queue.Queue[tuple[_TextAsked, TokenEvent]] = queue.Queue()
        self._opening = self._opening_tokens()

    def write(self) -> Corpus:
        """Until the time is up or there are enough tokens. What is still being written then counts as far as
        it is."""
        found, num_tokens = Corpus([], []), 0
        open_: dict[int, tuple[str, _TextAsked]] = {}
        with ProgressBar() as bar:
            while num_tokens < self._task.max_tokens and time.monotonic() < self._end_s:
                while len(open_) < self._most_open:
                    asked, sampling = self._next()
                    open_[id(asked)] = (
                        self._engine.submit(Submission(asked.prompt, sampling), self._listener(asked)),
                        asked,
                    )
                asked = self._wait_one()
                del open_[id(asked)]
                num_tokens += self._take(asked, found)
                bar("writing text", num_tokens, self._task.max_tokens)
            for request_id, _ in open_.values():
                self._engine.cancel(request_id)
            for _ in range(len(open_)):
                self._take(self._wait_one(), found)
        return found

    def _listener(self, asked: _TextAsked) -> Callable[[TokenEvent], None]:
        def listen(event: TokenEvent) -> None:
            asked.tokens.extend(event.tokens)
            if event.stop_token is not None:
                asked.tokens.append(event.stop_token)
            if event.finish is not None:
                self._done.put((asked, event))

        return listen

    def _wait_one(self) -> _TextAsked:
        while True:
            try:
                asked, event = self._done.get(timeout=_WAIT_S)
            except queue.Empty:
                raise StepFailed(self._engine.ended or f"no text was written for {_WAIT_S:g} s") from None
            if event.finish is FinishReason.ERROR:
                raise StepFailed(event.error or "the generation failed")
            return asked

    def _take(self, asked: _TextAsked, found: Corpus) -> int:
        """Keeps it; returns its tokens that count."""
        text = self._engine.tokenizer.decode(
            [token for token in asked.tokens if token not in self._engine.tokenizer.eos_ids]
        )
        if not asked.question:
            self._num_asking -= 1
            if 8 <= len(text) <= 400:
                self._made_up.append(text.strip())
            return 0
        if len(asked.tokens) < 8:
            return 0
        if not asked.held_out and len(text) > 200:
            self._written = [*self._written[-255:], text]
        (found.held_out if asked.held_out else found.training).append(
            Text(asked.prompt + asked.tokens, len(asked.prompt))
        )
        return len(asked.tokens)

    def _next(self) -> tuple[_TextAsked, SamplingParams]:
        seed = self._chooser.getrandbits(31)
        room = self._engine.max_model_len - len(self._opening)
        if self._opening and room >= 16 and len(self._made_up) + self._num_asking < 64:
            self._num_asking += 1
            return _TextAsked(self._opening, ""), SamplingParams(
                max_tokens=min(room, 64), temperature=1.0, top_p=0.95, seed=seed
            )
        kind = self._chooser.random()
        if self._made_up and kind < 0.5:
            question = self._made_up.pop()
        elif self._written and kind < 0.65:
            question = about_text(self._chooser.choice(self._written), self._chooser)
        else:
            question = next(self._questions)
        held_out = is_held_out(question)
        temperature = 0.0 if held_out else self._chooser.choice(_TEMPERATURES)
        prompt = self._encoded(question)
        room = min(self._task.training.max_len, self._engine.max_model_len) - len(prompt)
        if room < 16:
            return self._next()
        asked = _TextAsked(prompt, question, held_out=held_out)
        return asked, SamplingParams(max_tokens=min(room, 256), temperature=temperature, seed=seed)

    def _encoded(self, question: str) -> list[int]:
        tokenizer = self._engine.tokenizer
        return (
            tokenizer.encode_chat([{"role": "user", "content": question}])
            if tokenizer.has_chat_template
            else tokenizer.encode(question)
        )

    def _opening_tokens(self) -> list[int]:
        """What a conversation has before its first question: behind it the target asks itself."""
        if not self._engine.tokenizer.has_chat_template:
            return []
        return shared_prefix(self._encoded("Apple"), self._encoded("7"))


def _length(text: Text) -> int:
    return len(text.tokens)


def _since(started_s: float) -> str:
    return f"{time.monotonic() - started_s:.0f} s after the start"


def _print(line: str) -> None:
    print(line, flush=True)


# ---------------------------------------------------------------------------------------------- the questions

TOPICS = (
    "photosynthesis",
    "the French Revolution",
    "black holes",
    "sourdough bread",
    "the stock market",
    "electric cars",
    "bees",
    "volcanoes",
    "the Roman Empire",
    "vaccines",
    "chess",
    "jazz music",
    "the water cycle",
    "machine learning",
    "the Great Wall of China",
    "yoga",
    "climate change",
    "Shakespeare",
    "the human heart",
    "bicycles",
    "coffee",
    "the Moon",
    "dinosaurs",
    "democracy",
    "the internet",
    "tea",
    "World War II",
    "gravity",
    "the Amazon rainforest",
    "budgeting",
    "sleep",
    "elephants",
    "solar panels",
    "ancient Egypt",
    "football",
    "the immune system",
    "gardening",
    "programming in Python",
    "space travel",
    "pandas",
    "the Mona Lisa",
    "earthquakes",
    "nutrition",
    "the periodic table",
    "public speaking",
    "hiking",
    "databases",
    "the Renaissance",
    "penguins",
    "job interviews",
    "origami",
    "DNA",
    "the Olympic Games",
    "inflation",
    "wind power",
    "cats",
    "dogs",
    "the ocean",
    "poetry",
    "time management",
    "robots",
    "chocolate",
    "the Silk Road",
    "vitamins",
    "trains",
    "the solar system",
    "friendship",
    "recycling",
    "Mozart",
    "the Cold War",
    "algebra",
    "maps",
    "bridges",
    "hurricanes",
    "the brain",
    "cooking pasta",
    "writing an essay",
    "operating systems",
    "learning a language",
    "insurance",
)
TASKS = (
    "Explain {} to a ten-year-old.",
    "What are three interesting facts about {}?",
    "Write a short story about {}.",
    "Write a poem about {}.",
    "What are the main benefits and drawbacks of {}?",
    "Give me a step-by-step introduction to {}.",
    "Write an email to a colleague about {}.",
    "List ten questions for a quiz about {}, with their answers.",
    "What is the history of {}?",
    "Write a paragraph about {} in simple English.",
    "How does {} affect our daily life?",
    "Write a dialogue between two friends who talk about {}.",
    "Write a product description that has to do with {}.",
    "What do beginners often get wrong about {}?",
    "Compare {} with something similar.",
    "Write a blog post about {}.",
    "Make a table with facts about {}.",
    "Give five tips about {}.",
    "Write a speech about {}.",
    "Describe {} in one sentence.",
    "Write a JSON object that describes {}.",
    "Why is {} important?",
    "Write a letter to the editor about {}.",
    "What would happen without {}?",
    "Plan a lesson about {} for a school class.",
)
CODE = (
    "Write a Python function that {}.",
    "Write a JavaScript function that {}.",
    "Write a Python class that {}.",
    "Write a unit test for a function that {}.",
    "Explain how to write a program that {}.",
    "Write a C function that {}.",
)
JOBS = (
    "reverses a string",
    "checks whether a number is prime",
    "sorts a list of numbers",
    "finds the largest element of an array",
    "counts the words of a text",
    "reads a CSV file",
    "computes the Fibonacci sequence",
    "merges two sorted lists",
    "parses a date",
    "finds duplicates in a list",
    "computes a factorial",
    "converts Celsius to Fahrenheit",
    "implements a stack",
    "implements a queue",
    "searches a binary tree",
    "checks whether a word is a palindrome",
    "removes vowels from a string",
    "rolls two dice",
    "transposes a matrix",
    "computes the average of a list",
    "validates an email address",
    "keeps a bank account",
    "counts characters",
    "finds the shortest path in a graph",
    "flattens a nested list",
    "generates a random password",
    "downloads a web page",
)
TEXT_TASKS = (
    "Summarise the following text:\n\n{}",
    "Rewrite the following text in your own words:\n\n{}",
    "Correct the mistakes in the following text and repeat it:\n\n{}",
    "Repeat the following text exactly:\n\n{}",
    "What are the key points of this text?\n\n{}",
    "Make a list of the main ideas of this:\n\n{}",
    "{}\n\nAnswer with a quote from the text above: what is it about?",
    "Continue this text:\n\n{}",
)
_HELD_OUT = 20  # one question in so many is for measuring, and never for training


def questions(seed: int) -> Iterator[str]:
    """Without end, in an order of its own for each seed; each once before any comes again."""
    chooser = random.Random(seed)
    every = [task.format(topic) for task, topic in itertools.product(TASKS, TOPICS)]
    every += [code.format(job) for code, job in itertools.product(CODE, JOBS)] * 2
    while True:
        chooser.shuffle(every)
        yield from every


def about_text(text: str, chooser: random.Random) -> str:
    return chooser.choice(TEXT_TASKS).format(text[:1200])


def is_held_out(question: str) -> bool:
    """By its text alone, so that the same question is never on both sides."""
    return zlib.crc32(question.encode()) % _HELD_OUT == 0


def shared_prefix(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Tokens that two conversations begin with: what stands before their first words."""
    return [
        a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    ]
