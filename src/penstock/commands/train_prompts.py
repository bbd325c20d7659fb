"""What a target is asked when it writes the text that a draft head learns from. Owns the questions; needs no other data.

Three kinds, so that a head meets what users send: questions from templates, questions that the target itself makes up, and tasks over texts
that it wrote before.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterator, Sequence

TOPICS = (
    "photosynthesis", "the French Revolution", "black holes", "sourdough bread", "the stock market", "electric cars", "bees", "volcanoes",
    "the Roman Empire", "vaccines", "chess", "jazz music", "the water cycle", "machine learning", "the Great Wall of China", "yoga",
    "climate change", "Shakespeare", "the human heart", "bicycles", "coffee", "the Moon", "dinosaurs", "democracy", "the internet", "tea",
    "World War II", "gravity", "the Amazon rainforest", "budgeting", "sleep", "elephants", "solar panels", "ancient Egypt", "football",
    "the immune system", "gardening", "programming in Python", "space travel", "pandas", "the Mona Lisa", "earthquakes", "nutrition",
    "the periodic table", "public speaking", "hiking", "databases", "the Renaissance", "penguins", "job interviews", "origami", "DNA",
    "the Olympic Games", "inflation", "wind power", "cats", "dogs", "the ocean", "poetry", "time management", "robots", "chocolate",
    "the Silk Road", "vitamins", "trains", "the solar system", "friendship", "recycling", "Mozart", "the Cold War", "algebra", "maps",
    "bridges", "hurricanes", "the brain", "cooking pasta", "writing an essay", "operating systems", "learning a language", "insurance",
)  # fmt: skip
TASKS = (
    "Explain {} to a ten-year-old.", "What are three interesting facts about {}?", "Write a short story about {}.",
    "Write a poem about {}.", "What are the main benefits and drawbacks of {}?", "Give me a step-by-step introduction to {}.",
    "Write an email to a colleague about {}.", "List ten questions for a quiz about {}, with their answers.",
    "What is the history of {}?", "Write a paragraph about {} in simple English.", "How does {} affect our daily life?",
    "Write a dialogue between two friends who talk about {}.", "Write a product description that has to do with {}.",
    "What do beginners often get wrong about {}?", "Compare {} with something similar.", "Write a blog post about {}.",
    "Make a table with facts about {}.", "Give five tips about {}.", "Write a speech about {}.", "Describe {} in one sentence.",
    "Write a JSON object that describes {}.", "Why is {} important?", "Write a letter to the editor about {}.",
    "What would happen without {}?", "Plan a lesson about {} for a school class.",
)  # fmt: skip
CODE = (
    "Write a Python function that {}.", "Write a JavaScript function that {}.", "Write a Python class that {}.",
    "Write a unit test for a function that {}.", "Explain how to write a program that {}.", "Write a C function that {}.",
)  # fmt: skip
JOBS = (
    "reverses a string", "checks whether a number is prime", "sorts a list of numbers", "finds the largest element of an array",
    "counts the words of a text", "reads a CSV file", "computes the Fibonacci sequence", "merges two sorted lists", "parses a date",
    "finds duplicates in a list", "computes a factorial", "converts Celsius to Fahrenheit", "implements a stack", "implements a queue",
    "searches a binary tree", "checks whether a word is a palindrome", "removes vowels from a string", "rolls two dice",
    "transposes a matrix", "computes the average of a list", "validates an email address", "keeps a bank account", "counts characters",
    "finds the shortest path in a graph", "flattens a nested list", "generates a random password", "downloads a web page",
)  # fmt: skip
TEXT_TASKS = (
    "Summarise the following text:\n\n{}", "Rewrite the following text in your own words:\n\n{}",
    "Correct the mistakes in the following text and repeat it:\n\n{}", "Repeat the following text exactly:\n\n{}",
    "What are the key points of this text?\n\n{}", "Make a list of the main ideas of this:\n\n{}",
    "{}\n\nAnswer with a quote from the text above: what is it about?", "Continue this text:\n\n{}",
)  # fmt: skip
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
    return [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))]
